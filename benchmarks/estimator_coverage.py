"""How often the 90 % intervals of `BayesianRegressor()` cover, with no argument, on six regression sets.

Gal's splits 10 to 19 of five UCI tables, and ten random tenths of airfoil: none of them was looked at when
the defaults were chosen. Each row names the epochs that the default was when it was measured; `--sets`
measures some anew and keeps the others.

Run: TORCHBAYES_UCI=FOLDER python benchmarks/estimator_coverage.py [--json results/estimator-coverage.json]
     [--sets boston,yacht]
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path

import torch

import torchbayes as tb
from torchbayes.data.uci import load_uci

SETS = ("boston", "concrete", "energy", "wine", "yacht", "airfoil")
SPLITS = range(10, 20)
ASKED = 0.9


def covered(name: str, split: int) -> tuple[int, int, int]:
    """How many targets of a test set lie in their intervals, how many there are, and the epochs."""
    data = load_uci(f"uci:{name}", os.environ.get("TORCHBAYES_UCI"), split=split)
    torch.manual_seed(split)
    fitted = tb.BayesianRegressor(random_state=split).fit(
        data.train.inputs.numpy(), data.train.targets.numpy().ravel()
    )
    low, high = fitted.predict_interval(data.test.inputs.numpy(), ASKED)
    truth = data.test.targets.numpy().ravel()
    return int(((low <= truth) & (truth <= high)).sum()), len(truth), fitted.run_.settings["epochs"]


def main() -> None:
    """Measure and print, and write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, float]] = {}
    if arguments.json and arguments.json.exists():
        found = json.loads(arguments.json.read_text(encoding="utf-8"))["sets"]
    for name in arguments.sets.split(","):
        inside, count, epochs = zip(*(covered(name, split) for split in SPLITS), strict=True)
        share = sum(inside) / sum(count)
        found[name] = {
            "inside": sum(inside), "examples": sum(count), "coverage": round(share, 4),
            "epochs": max(epochs),
        }  # fmt: skip
        print(f"{name}: {sum(inside)} of {sum(count)}, {share:.1%}", flush=True)
        if arguments.json:
            record = {"asked": ASKED, "sets": found}
            arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
