"""What a Laplace posterior adds to a trained network: LeNet-5 on Fashion-MNIST and on CIFAR-10.

The networks are those of recipes/demo/fashion-mnist.toml: 10,000 training images, 24 epochs, batches of 100,
the prior N(0, 1), the defaults of the methods with a cosine. 2,000 other training images choose a prior where
a row says "held out"; no setting was chosen on test images. For every seed:

| row | |
| --- | --- |
| map | one network |
| laplace, last layer | a full posterior over the last layer of that network, linearised |
| laplace, last layer kronecker | the same with a Kronecker posterior, which is the default |
| laplace, kronecker | a Kronecker posterior over all of its weights, linearised |
| swag | as in the recipe: SGD with a constant rate of 0.05, 32 draws |
| ensemble | the network of `map` and four others |

A Laplace row has the prior of training, the one that the evidence picks, or the one with the best NLL on the
held-out images. Out of distribution: the first 2,000 test images of MNIST (for CIFAR-10 with a margin, in
grey); AUROC by the entropy. `pass` is the seconds of making a posterior, without the search for a prior, in
epochs of `map`.

Run: OMP_NUM_THREADS=1 python benchmarks/laplace_records.py --work FOLDER [--seeds 2]
     (writes results/laplace-records.json and the tables of docs/laplace.md; FOLDER keeps the trained
     networks, and a stopped run continues)
     python benchmarks/laplace_records.py --table (writes only the tables, from the record)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import progress
from torch import Tensor, nn
from torch.nn import functional

import torchbayes as tb
from torchbayes import metrics
from torchbayes.core.storage import write_json
from torchbayes.experiments.provenance import provenance
from torchbayes.models import build_model
from torchbayes.predict.results import ClassPredictive

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results" / "laplace-records.json", ROOT / "docs" / "laplace.md"
MARKS = "<!-- laplace-records -->\n", "<!-- /laplace-records -->\n"
TASKS = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
EXAMPLES, HELD_OUT, FOREIGN, MEMBERS, EPOCHS, BATCH, DRAWS = 10_000, 2_000, 2_000, 5, 24, 100, 32
SHOWN = {
    "accuracy": ".3f", "nll": ".4f", "ece": ".4f", "auroc_ood": ".3f", "pass": ".2f", "prior": ".3g",
}  # fmt: skip
PRIORS = ("prior of training", "evidence", "held out")
Rows = dict[str, dict[str, float]]


class Task:
    """Normalised images of one seed: to train on, to choose a prior by, to test with, and foreign ones."""

    def __init__(self, name: str, seed: int) -> None:
        data, other = tb.load_data(name), tb.load_data("mnist").test.inputs[:FOREIGN]
        self.name, self.seed = name, seed
        self.shape = tuple(data.shape)
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))

        def scaled(images: Tensor) -> Tensor:
            return (images.float() / 255 - mean) / std

        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
        rows, rest = order[:EXAMPLES], order[EXAMPLES : EXAMPLES + HELD_OUT]
        self.train = scaled(data.train.inputs[rows]), data.train.targets[rows]
        self.held_out = scaled(data.train.inputs[rest]), data.train.targets[rest]
        self.test = scaled(data.test.inputs), data.test.targets
        margin = (self.shape[-1] - 28) // 2
        foreign = functional.pad(other, [margin] * 4).expand(-1, self.shape[0], -1, -1)
        self.foreign = scaled(foreign)

    def network(self, seed: int) -> nn.Module:
        """Return a LeNet-5 that is not trained."""
        torch.manual_seed(seed)
        return build_model("lenet5", input_shape=self.shape, num_classes=10)

    def scores(self, predict: Callable[[Tensor], Any]) -> dict[str, float]:
        """Return the scores of a prediction, with the seconds that it took."""
        start = time.perf_counter()
        p, foreign = predict(self.test[0]), predict(self.foreign)
        seconds = time.perf_counter() - start
        found = metrics.classification_scores(p.probs, self.test[1], ood_probs=foreign.probs)
        kept = {key: found[key] for key in ("accuracy", "nll", "ece", "auroc_ood")}
        return {**kept, "seconds_predicting": seconds}


def trained(task: Task, member: int, folder: Path) -> tuple[nn.Module, float]:
    """Return a network trained by MAP, and the seconds of an epoch; the folder keeps it."""
    seed = MEMBERS * task.seed + member
    net, file = task.network(seed), folder / f"{task.name}-{seed}.pt"
    if not file.exists():
        run = tb.fit(
            net, task.train, "map", epochs=EPOCHS, batch_size=BATCH, schedule="cosine", seed=seed,
            progress=False,
        )  # fmt: skip
        torch.save((run.model.state_dict(), run.seconds / EPOCHS), file)
        progress(f"{task.name}: network {seed} trained in {run.seconds:.0f} s")
    state, seconds = torch.load(file)
    net.load_state_dict(state)
    return net.eval(), seconds


def laplace_rows(task: Task, net: nn.Module, epoch: float, done: Rows) -> Rows:
    """Return the rows of every posterior, each with three priors, those that are done as they are."""
    rows: Rows = {}
    few = task.train[0][:100], task.train[1][:100]
    tb.Laplace(net, few, check=False)  # what is imported and built on first use
    for name, options in (
        ("last layer", {"subset": "last_layer", "structure": "full"}),
        ("last layer kronecker", {"subset": "last_layer"}),
        ("kronecker", {}),
    ):
        names = {how: f"laplace, {name}, {how}" for how in PRIORS}
        if set(names.values()) <= set(done):
            rows |= {each: done[each] for each in names.values()}
            continue
        start = time.perf_counter()
        la = tb.Laplace(net, task.train, prior=1.0, check=False, **options)
        taken = (time.perf_counter() - start) / epoch

        def predict(images: Tensor, la: tb.Laplace = la) -> Any:
            return la.predictive(images, generator=torch.Generator().manual_seed(0))

        for how, each in names.items():
            start = time.perf_counter()
            if how == "evidence":
                la.optimize_prior()
            elif how == "held out":
                la.optimize_prior("validation", validation=task.held_out)
            search = time.perf_counter() - start
            rows[each] = {
                **task.scores(predict), "prior": float(la.prior.scalar or 0), "pass": taken,
                "seconds_choosing": search,
            }  # fmt: skip
            progress(f"{task.name}, {each}: {rows[each]}")
    return rows


def measure(task: Task, folder: Path, done: Rows) -> Rows:
    """Return all rows of one seed; those that are done are not measured again."""

    @torch.no_grad()
    def probs(net: nn.Module, images: Tensor) -> Tensor:
        return torch.cat([net(part).softmax(1) for part in images.split(500)])

    def together(nets: list[nn.Module]) -> Callable[[Tensor], Any]:
        return lambda images: prediction(torch.stack([probs(n, images) for n in nets]).mean(0))

    net, epoch = trained(task, 0, folder)
    first = done.get("map") or {**task.scores(together([net])), "epoch_seconds": epoch}
    rows = {"map": first} | laplace_rows(task, net, epoch, done)
    rows["swag"] = done.get("swag") or swag(task)
    rows["ensemble"] = done.get("ensemble") or task.scores(
        together([trained(task, member, folder)[0] for member in range(MEMBERS)])
    )
    return rows


def swag(task: Task) -> dict[str, float]:
    """Train by SWAG and return its row."""
    run = tb.fit(
        task.network(MEMBERS * task.seed), task.train, "swag", epochs=EPOCHS, batch_size=BATCH,
        seed=task.seed, optimizer="sgd", lr=0.05, progress=False,
    )  # fmt: skip

    def drawn(images: Tensor) -> Any:
        generator = torch.Generator().manual_seed(0)
        return tb.predictive(run.model, run.posterior, images, samples=DRAWS, generator=generator)

    return task.scores(drawn)


def prediction(probs: Tensor) -> ClassPredictive:
    """Return probabilities as a prediction."""
    return ClassPredictive(probs, torch.zeros(len(probs)), 1)


def tables(record: dict[str, Any]) -> str:
    """Return the tables of the page, means over seeds."""
    lines = []
    for task, title in TASKS.items():
        seeds = record["tasks"].get(task)
        if not seeds:
            continue
        count = len(seeds)
        lines += [
            f"{title}, LeNet-5, {count} seed{'s' * (count > 1)}:", "",
            "| | accuracy | NLL | against map | ECE | AUROC OOD | pass, in epochs | prior |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for name in seeds[min(seeds)]:
            cells = []
            for key, form in SHOWN.items():
                values = [rows[name][key] for rows in seeds.values() if key in rows[name]]
                cells.append(format(statistics.mean(values), form) if values else "")
                if key == "nll":
                    off = [rows[name][key] - rows["map"][key] for rows in seeds.values()]
                    cells.append("" if name == "map" else format(statistics.mean(off), "+.4f"))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def page(text: str, record: dict[str, Any]) -> str:
    """Return the page with its tables made anew."""
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + "\n" + tables(record) + "\n" + MARKS[1] + rest.split(MARKS[1])[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": "python benchmarks/laplace_records.py --work FOLDER"}
    if RECORD.exists():
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    record.setdefault("tasks", {})
    if not args.table:
        if args.work is None:
            parser.error("give --work FOLDER, where the trained networks are kept")
        args.work.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        for seed in range(args.seeds):
            for name in TASKS:
                seeds = record["tasks"].setdefault(name, {})
                done = seeds.get(str(seed), {})
                seeds[str(seed)] = measure(Task(name, seed), args.work, done)
                if seeds[str(seed)] != done:
                    write_json(RECORD, {**record, **provenance()})
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
