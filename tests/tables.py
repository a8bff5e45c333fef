"""A tiny UCI table in the layout of Gal's repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def gal_folder(root: Path, rows: int) -> Path:
    """Write uci/yacht with 3 inputs around its target, column 1, and two splits; return its folder."""
    folder = root / "uci" / "yacht"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.savetxt(folder / "data.txt", rng.normal(size=(rows, 4)))
    np.savetxt(folder / "index_features.txt", [0, 2, 3])
    np.savetxt(folder / "index_target.txt", [1])
    for k in range(2):
        order = rng.permutation(rows)
        np.savetxt(folder / f"index_train_{k}.txt", order[: rows * 3 // 4])
        np.savetxt(folder / f"index_test_{k}.txt", order[rows * 3 // 4 :])
    return folder
