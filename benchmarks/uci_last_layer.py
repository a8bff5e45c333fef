"""Last layers on UCI regressions with Gal's splits: VBLL, and the exact last layer on the features of MAP.

One hidden layer of 50 units, as Gal and Ghahramani have it, standardised data, Adam, batches of 32, 100
epochs and a cosine from 0.01 for every data set. The prior precision, 1, 10 or 100, is the best on a fifth of
a split's training set, held out as Gal does; the network is then trained again on all of it. Both predictions
are closed forms. The networks of all splits are trained at once (`torch.vmap`). A standard error is over
splits. Published figures stand beside ours as their authors give them; they had other training lengths and
choices.

The data are in the folders of Gal's repository, each with data.txt, index_features.txt, index_target.txt and
index_train_0.txt, index_test_0.txt and so on.

Run: OMP_NUM_THREADS=1 python benchmarks/uci_last_layer.py FOLDER
     (writes results/uci-last-layer.json, in six minutes on an idle core; FOLDER is $TORCHBAYES_DATA/uci if it
     is not given; a stopped run continues)
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import torchbayes as tb
from torchbayes.core.storage import write_json
from torchbayes.experiments.provenance import provenance

RECORD = Path(__file__).parents[1] / "results" / "uci-last-layer.json"
SETS = {
    "boston": "bostonHousing", "concrete": "concrete", "energy": "energy",
    "wine": "wine-quality-red", "yacht": "yacht",
}  # fmt: skip
HIDDEN, EPOCHS, BATCH, LR, SPLITS = 50, 100, 32, 0.01, 20
PRIORS, HELD_OUT = (1.0, 10.0, 100.0), 0.2

# RMSE and NLL. MC dropout: computed from the stored results of the repository of Gal and Ghahramani (2016).
# VBLL: Harrison et al. (2024), as far as a public index of its tables lists them.
PUBLISHED: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "MC dropout (Gal)": {
        "boston": (2.90, 2.40), "concrete": (4.83, 2.94), "energy": (0.54, 1.21),
        "wine": (0.62, 0.93), "yacht": (0.67, 1.25),
    },
    "VBLL (Harrison et al.)": {
        "concrete": (None, 3.51), "energy": (0.531, 0.852), "wine": (None, 0.998),
    },
}  # fmt: skip


class Split:
    """A data set's training and test examples of one split, standardised by the former."""

    def __init__(self, folder: Path, number: int) -> None:
        data = np.loadtxt(folder / "data.txt")
        features = np.loadtxt(folder / "index_features.txt").astype(int)
        target = int(np.loadtxt(folder / "index_target.txt"))
        train, test = (
            np.loadtxt(folder / f"index_{part}_{number}.txt").astype(int)
            for part in ("train", "test")
        )
        x, y = data[:, features], data[:, [target]]
        spread = x[train].std(0)
        spread[spread == 0] = 1
        self.scale = float(y[train].std())
        x, y = (x - x[train].mean(0)) / spread, (y - y[train].mean()) / self.scale
        self.train = torch.tensor(x[train]).float(), torch.tensor(y[train]).float()
        self.test = torch.tensor(x[test]).float(), torch.tensor(y[test]).float()

    def inner(self) -> Split:
        """Return a split of the training set, to choose a setting by."""
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        count = round(HELD_OUT * len(x))
        result = copy.copy(self)
        result.test = x[order[:count]], y[order[:count]]
        result.train = x[order[count:]], y[order[count:]]
        return result

    def scores(self, prediction: tb.RegressionPredictive) -> tuple[float, float]:
        """Return RMSE and mean NLL on the test set, in the target's own units."""
        y = self.test[1]
        rmse = float((prediction.mean - y).square().mean().sqrt()) * self.scale
        return rmse, float(-prediction.log_prob(y).mean()) + math.log(self.scale)


class Penalised(nn.Module):
    """A module whose forward is the loss of a batch, for `functional_call`."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        return self._loss(self.net, x, y)


def trained(splits: list[Split], make: Callable[[int, int], Penalised]) -> list[nn.Module]:
    """Train one network per split, all of them at once, and return them."""
    x, y = (torch.stack([split.train[i] for split in splits]) for i in (0, 1))
    count = x.shape[1]
    modules = []
    for number in range(len(splits)):
        torch.manual_seed(number)
        modules.append(make(x.shape[2], count))
    parameters, buffers = stack_module_state(modules)  # type: ignore[arg-type]
    plain = copy.deepcopy(modules[0])

    def loss(weights: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional_call(plain, (weights, buffers), (inputs, targets))  # type: ignore[no-any-return]

    losses = vmap(loss)
    optimizer = torch.optim.Adam(parameters.values(), lr=LR, fused=True)
    steps = EPOCHS * math.ceil(count / BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = torch.arange(len(splits)).unsqueeze(1)
    for batch in batches(len(splits), count):
        optimizer.zero_grad()
        losses(parameters, x[rows, batch], y[rows, batch]).sum().backward()
        optimizer.step()
        scheduler.step()
    for number, module in enumerate(modules):
        module.load_state_dict(
            {name: p[number].detach() for name, p in parameters.items()}, strict=False
        )
    return [module.net.eval() for module in modules]


def batches(networks: int, count: int) -> Iterator[Tensor]:
    """Yield the examples of every network's next batch; each has an order of its own."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        order = torch.rand(networks, count, generator=generator).argsort(1)
        yield from order.split(BATCH, 1)


def network(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def vbll(splits: list[Split], prior: float) -> list[tuple[float, float]]:
    """Train the variational last layer together with the features."""

    def make(features: int, count: int) -> Penalised:
        noise = tb.GaussianNoise(learned=True)
        net = tb.VBLL(network(features), noise, train_size=count, prior=prior)
        return Penalised(net, lambda net, x, y: net.loss(x, y))

    nets = trained(splits, make)
    return [s.scores(n.predictive(s.test[0])) for s, n in zip(splits, nets, strict=True)]  # type: ignore[operator]


class MapLoss(nn.Module):
    """A network and its noise, with the loss of MAP: mean NLL − log prior / train_size."""

    def __init__(self, features: int, count: int, prior: float) -> None:
        super().__init__()
        self.model, self.noise = network(features), tb.GaussianNoise(learned=True)
        self.prior, self.count = tb.GaussianPrior(precision=prior), count

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        penalty = self.prior.log_prob(dict(self.model.named_parameters())) / self.count
        return self.noise.loss(self.model(x), y) - penalty


def exact(splits: list[Split], prior: float) -> list[tuple[float, float]]:
    """Fit the exact last layer, its noise and prior by the evidence, to the features of a MAP network."""

    def make(features: int, count: int) -> Penalised:
        return Penalised(MapLoss(features, count, prior), lambda net, x, y: net.loss(x, y))

    nets = trained(splits, make)
    heads = [
        tb.variational.ExactLastLayer(n.model, s.train) for s, n in zip(splits, nets, strict=True)
    ]  # type: ignore[arg-type]
    return [s.scores(head.predictive(s.test[0])) for s, head in zip(splits, heads, strict=True)]


METHODS = {"vbll": vbll, "exact last layer": exact}


def chosen(
    splits: list[Split], run: Callable[[list[Split], float], list[tuple[float, float]]]
) -> dict[str, list[float]]:
    """Return every split's RMSE, NLL and the prior that it was trained with."""
    inner = [split.inner() for split in splits]
    nll = np.array([[nll for _, nll in run(inner, prior)] for prior in PRIORS])
    best = nll.argmin(0)
    scores: list[tuple[float, float]] = [(0.0, 0.0)] * len(splits)
    for place in sorted(set(best)):
        own = np.flatnonzero(best == place)
        for split, score in zip(own, run([splits[i] for i in own], PRIORS[place]), strict=True):
            scores[split] = score
    rmse, found = zip(*scores, strict=True)
    return {"rmse": list(rmse), "nll": list(found), "prior": [PRIORS[i] for i in best]}


def measure(folder: Path) -> dict[str, Any]:
    """Return the record, with the results that it lacks measured."""
    record: dict[str, Any] = {"results": {}}
    if RECORD.exists():
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, place in SETS.items():
        splits: list[Split] = []
        for method, run in METHODS.items():
            if method in record["results"].get(name, {}):
                continue
            splits = splits or [Split(folder / place, number) for number in range(SPLITS)]
            started = time.perf_counter()
            row: dict[str, Any] = dict(chosen(splits, run))
            row["seconds"] = round(time.perf_counter() - started, 1)
            record["results"].setdefault(name, {})[method] = row
            record = {
                "command": "OMP_NUM_THREADS=1 python benchmarks/uci_last_layer.py FOLDER",
                **provenance(),
                "settings": {"hidden": HIDDEN, "epochs": EPOCHS, "batch_size": BATCH, "lr": LR},
                "results": record["results"],
            }
            write_json(RECORD, record)
            print(f"{name}, {method}: {row['seconds']} s", flush=True)
    return record


def table(record: dict[str, Any]) -> str:
    """Return the record and the published figures as a Markdown table of RMSE / NLL."""
    methods = [*METHODS, *PUBLISHED]
    lines = [f"| RMSE / NLL | {' | '.join(methods)} |", "| --- " * (len(methods) + 1) + "|"]
    for name in SETS:
        cells = []
        for method in METHODS:
            row = record["results"][name][method]
            cells.append(" / ".join(_cell(np.array(row[score])) for score in ("rmse", "nll")))
        for values in PUBLISHED.values():
            pair = values.get(name, (None, None))
            cells.append(" / ".join("–" if v is None else f"{v:.2f}" for v in pair))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: np.ndarray) -> str:
    error = values.std(ddof=1) / math.sqrt(len(values))
    return f"{values.mean():.2f} ± {error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the data sets")
    folder = parser.parse_args().folder
    if folder is None:
        folder = Path(os.environ.get("TORCHBAYES_DATA", "data")) / "uci"
    missing = [place for place in SETS.values() if not (folder / place / "data.txt").exists()]
    if missing:
        parser.error(f"{folder} has no {missing[0]}/data.txt: give the folder of Gal's data sets")
    print(table(measure(folder)))


if __name__ == "__main__":
    main()
