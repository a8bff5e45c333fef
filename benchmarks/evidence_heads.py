"""Does the evidence pick a good prior for a new last layer? Against the best of a grid, on five tasks.

A network is trained, on other data or other rows of the table, and frozen; a new linear layer is fitted to
its features with the prior N(0, 1/δ), for each of the 20 precisions δ of evidence_grid.py. Here the model is
linear in its weights, as the evidence assumes: it is exact for regression, whose noise is the one with the
largest evidence, and for classes the maximum is unique. The pick is the δ with the largest evidence of a full
posterior over the layer, which sees the training data alone; NLLs are those of the linearised prediction on
held-out data.

| task | features | the layer's training data | held out |
| --- | --- | --- | --- |
| mnist | LeNet-5 of 10,000 images of Fashion-MNIST | 1,000 images | 5,000 |
| fashion-mnist | LeNet-5 of 10,000 images of MNIST | 1,000 images | 5,000 |
| concrete, energy, wine | 50 hidden units, a third of the rows | another third | the last third |

The tasks and everything else were settled before the first run, and that run is the record.

    python benchmarks/evidence_heads.py --uci FOLDER [--task mnist] [--json results/evidence-heads.json]

Images come from TORCHBAYES_DATA. A task that FILE has is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence_grid import GRID, TABLES, Data, compared, regress
from scipy.optimize import minimize
from timing import progress
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import torchbayes as tb
from torchbayes.core.last_layer import find_last_layer, with_features
from torchbayes.core.storage import write_json
from torchbayes.experiments.provenance import provenance
from torchbayes.models import lenet5, mlp

IMAGES = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
"""Tasks of images, and the data that their features are learned from."""
ROWS = ("concrete", "energy", "wine")
TRAINED, FITTED, HELD_OUT = 10_000, 1_000, 5_000


def features(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return what the network's last layer is given."""
    name, layer = find_last_layer(network.eval())
    with torch.no_grad():
        parts = [with_features(network, name, layer, part)[0] for part in inputs.split(500)]
    return torch.cat(parts).double()


def of_images(task: str) -> tuple[Data, float]:
    """Return features and labels of one data set's images, by a network of another's."""
    other = tb.load_data(IMAGES[task]).train
    first = (other.inputs[:TRAINED].float() / 255, other.targets[:TRAINED])
    trained = tb.fit(
        lenet5(in_channels=1, image_size=28), first, epochs=10, lr=1e-3, progress=False
    )
    data = tb.load_data(task)
    parts = []
    for split, count in ((data.train, FITTED), (data.test, HELD_OUT)):
        images = split.inputs[:count].float() / 255
        parts += [features(trained.model, images), split.targets[:count]]
    return (parts[0], parts[1], parts[2], parts[3]), 1.0


def of_rows(folder: Path) -> tuple[Data, float]:
    """Return features and targets of two thirds of a table, by a network of the first third."""
    data = np.loadtxt(folder / "data.txt")
    columns, target = (
        np.loadtxt(folder / f"index_{name}.txt").astype(int) for name in ("features", "target")
    )
    thirds = np.array_split(np.random.default_rng(0).permutation(len(data)), 3)
    x, y = data[:, columns], data[:, target].reshape(-1, 1)
    for values in (x, y):
        std = values[thirds[0]].std(0)
        values -= values[thirds[0]].mean(0)
        values /= np.where(std > 0, std, 1)
    inputs, targets = torch.tensor(x).float(), torch.tensor(y)
    first = (inputs[thirds[0]], targets[thirds[0]].float())
    network = mlp(inputs.shape[1], 1, hidden=(50,))
    trained = tb.fit(network, first, epochs=200, batch_size=32, lr=1e-3, progress=False)
    units = features(trained.model, inputs)
    return (units[thirds[1]], targets[thirds[1]], units[thirds[2]], targets[thirds[2]]), float(
        std[0]
    )


def classify(head: nn.Linear, x: Tensor, y: Tensor, delta: float) -> tb.Categorical:
    """Bring a linear layer to the maximum of its posterior, which is unique."""
    inputs, labels, shape = x.numpy(), y.numpy(), head.weight.shape
    rows = np.arange(len(labels))

    def loss_and_gradient(vector: np.ndarray) -> tuple[float, np.ndarray]:
        weight, bias = vector[: shape.numel()].reshape(shape), vector[shape.numel() :]
        logits = inputs @ weight.T + bias
        logits -= logits.max(1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        errors = np.exp(log_probs)
        errors[rows, labels] -= 1
        slope = np.concatenate([(errors.T @ inputs).ravel(), errors.sum(0)])
        loss = -log_probs[rows, labels].sum() + 0.5 * delta * vector @ vector
        return float(loss), slope + delta * vector

    start = np.zeros(sum(p.numel() for p in head.parameters()))
    options = {"maxiter": 10_000, "maxfun": 10_000, "ftol": 1e-12, "gtol": 1e-5}
    found = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    vector_to_parameters(torch.from_numpy(found.x), head.parameters())
    return tb.Categorical()


def judged(data: Data, unit: float) -> dict[str, Any]:
    """Fit the layer with every precision; return the pick and the best, NLLs in the target's units."""
    x, y, x_test, y_test = data
    rows = []
    for delta in GRID:
        torch.manual_seed(0)
        if y.is_floating_point():
            head = nn.Linear(x.shape[1], 1, dtype=torch.float64)
            likelihood: tb.Likelihood = regress(head, x, y, delta)
        else:
            head = nn.Linear(x.shape[1], int(y.max()) + 1, dtype=torch.float64)
            likelihood = classify(head, x, y, delta)
        la = tb.Laplace(
            head, (x, y), likelihood, structure="full", prior=delta, batch_size=500, check=False
        )
        p = la.predictive(x_test, samples=500, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            alone = float(likelihood.loss(head(x_test), y_test))
        rows.append({
            "precision": delta, "evidence": float(la.log_marginal_likelihood()),
            "nll": -float(p.log_prob(y_test).mean()) + math.log(unit),
            "network_nll": alone + math.log(unit),
        })  # fmt: skip
    return {"unit": unit, **compared(rows), "grid": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, required=True)
    parser.add_argument("--task", action="append", choices=[*IMAGES, *ROWS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"tasks": {}}
    if args.json is not None and args.json.exists():
        record = json.loads(args.json.read_text(encoding="utf-8"))
    for task in args.task or [*IMAGES, *ROWS]:
        if task in record["tasks"]:
            continue
        data, unit = of_images(task) if task in IMAGES else of_rows(args.uci / TABLES[task])
        torch.set_default_dtype(torch.float64)
        found = record["tasks"][task] = judged(data, unit)
        torch.set_default_dtype(torch.float32)
        for key in ("nll", "network_nll"):
            best = found[key]["best"]
            progress(
                f"{task}: {key} {found['pick'][key]:.4f} at the evidence's {found['pick']['precision']:.3g}, "
                f"best {best[key]:.4f} at {best['precision']:.3g}: {found[key]['share']:.2%}"
            )
        if args.json is not None:
            write_json(args.json, {**record, **provenance()})


if __name__ == "__main__":
    main()
