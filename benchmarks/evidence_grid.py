"""Does the evidence pick a good prior? Held-out NLL of the pick against the best of a grid, on five tasks.

For each of 20 precisions δ from 10⁻² to 10² a network of 20 hidden units is trained as MAP with the prior
N(0, 1/δ). Its full Laplace posterior has an evidence, from the training data alone; the pick is the δ with
the largest one. It is judged by the held-out NLL: for classes that of the network, for regression that of the
linearised prediction with the noise that the evidence says. Beside it: the pick of a Kronecker posterior.

    python benchmarks/evidence_grid.py --uci FOLDER [--json results/evidence-grid.json]

FOLDER has the UCI tables yacht, energy and concrete with Gal's files that name their columns.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons
from timing import progress
from torch import Tensor, nn

import torchbayes as tb

GRID = torch.logspace(-2, 2, 20).tolist()
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def table(folder: Path) -> Data:
    """Return a UCI table in two random halves, standardised by the first: Gal's test sets are too small."""
    data = np.loadtxt(folder / "data.txt")
    features, target = (
        np.loadtxt(folder / f"index_{name}.txt").astype(int) for name in ("features", "target")
    )
    order = np.random.default_rng(0).permutation(len(data))
    train, test = order[: len(data) // 2], order[len(data) // 2 :]
    parts = []
    for values in (data[:, features], data[:, target].reshape(-1, 1)):
        mean, std = values[train].mean(0), values[train].std(0)
        scaled = (values - mean) / np.where(std > 0, std, 1)
        parts += [torch.tensor(scaled[rows], dtype=torch.float32) for rows in (train, test)]
    return parts[0], parts[2], parts[1], parts[3]


def digits() -> Data:
    """Return scikit-learn's digits, 1,000 to train on."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1000]], y[order[:1000]], x[order[1000:]], y[order[1000:]]


def moons() -> Data:
    """Return two moons with much noise."""
    x, y = make_moons(1200, noise=0.3, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return x[:200], y[:200], x[200:], y[200:]


def measure(data: Data, delta: float, epochs: int) -> dict[str, float]:
    """Train with one precision; return the evidence and the held-out NLL."""
    x, y, x_test, y_test = data
    torch.manual_seed(0)
    classes = not y.is_floating_point()
    outputs = int(y.max()) + 1 if classes else 1
    net = nn.Sequential(nn.Linear(x.shape[1], 20), nn.Tanh(), nn.Linear(20, outputs))
    likelihood = tb.Categorical() if classes else tb.GaussianNoise(0.5, learned=True)
    net = tb.fit(
        net, (x, y), likelihood=likelihood, epochs=epochs, batch_size=len(x), lr=0.02,
        schedule="cosine", prior=delta, progress=False,
    ).model.eval()  # fmt: skip
    full, kronecker = (
        tb.Laplace(
            net, (x, y), likelihood, structure=structure, prior=delta, batch_size=512,
            check=False,
        )
        for structure in ("full", "kronecker")
    )  # fmt: skip
    if classes:
        with torch.no_grad():
            nll = float(likelihood.loss(net(x_test), y_test))
    else:
        for la in (
            full,
            kronecker,
        ):  # the noise of the training errors is too small: the evidence's
            levels = float(likelihood.std.detach()) * torch.logspace(-0.5, 1, 46)
            found = [float(la.log_marginal_likelihood(None, level)) for level in levels]
            la.noise = levels[found.index(max(found))]
        nll = -float(full.predictive(x_test).log_prob(y_test).mean())
    return {
        "evidence": float(full.log_marginal_likelihood()),
        "kronecker_evidence": float(kronecker.log_marginal_likelihood()), "nll": nll,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {"digits": digits(), "moons": moons()}
    tasks |= {name: table(args.uci / name) for name in ("yacht", "energy", "concrete")}
    found: dict[str, Any] = {}
    for name, data in tasks.items():
        rows = [{"precision": d, **measure(data, d, args.epochs)} for d in GRID]
        pick = max(rows, key=lambda row: row["evidence"])
        other = max(rows, key=lambda row: row["kronecker_evidence"])
        best = min(rows, key=lambda row: row["nll"])
        lost = pick["nll"] - best["nll"]
        found[name] = {
            "grid": rows, "pick": pick, "kronecker_pick": other, "best": best, "lost_nats": lost,
            "share": lost / abs(best["nll"]) if best["nll"] else math.inf,
        }  # fmt: skip
        progress(
            f"{name}: evidence picks {pick['precision']:.3g} (NLL {pick['nll']:.4f}), the best is "
            f"{best['precision']:.3g} (NLL {best['nll']:.4f}): {lost:.4f} nats, {found[name]['share']:.2%}; "
            f"Kronecker picks {other['precision']:.3g} (NLL {other['nll']:.4f})"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
