"""Every method at its defaults beside the No-U-Turn Sampler: a 2-20-2 network on two moons.

The reference is the exact posterior of 102 weights with a N(0, 1) prior given 200 points, by chains of NUTS
(Pyro). Each method trains with no option given, for `fit`'s own epochs and batches. Compared are predictions
on a grid that goes beyond the data: the share of points with the same class, and the total variation
½ Σ |p − q| (Izmailov et al., "What are Bayesian neural network posteriors really like?", ICML 2021, sec. 4).
What two chains of NUTS differ by is the noise of the reference.

Rows are written as they are measured, so that a stopped run continues; `--methods` measures those anew.

Run: python benchmarks/nuts.py [--json results/nuts.json] [--methods sgld,map] [--seeds 2]
     (needs Pyro: pip install "torchbayes[nuts]")
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.experiments.provenance import provenance

COUNT, CHAINS, SAMPLES, WARMUP = 200, 2, 200, 150
DRAWS = 400
GRID = torch.cartesian_prod(torch.linspace(-2, 3, 20), torch.linspace(-1.5, 2, 20))


def network() -> nn.Module:
    """2-20-2, smooth, because NUTS follows gradients."""
    return nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))


def data() -> tuple[Tensor, Tensor]:
    """The training set."""
    x, y = make_moons(COUNT, noise=0.3, random_state=0)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def nuts(seed: int) -> list[float]:
    """The probability of the second class at every point of the grid, by one chain."""
    torch.manual_seed(seed)
    net = network()
    start = tb.Point(tb.snapshot(net))
    found = tb.checks.compare_to_nuts(
        net, start, data(), GRID, samples=SAMPLES, warmup=WARMUP, seed=seed
    )
    probs = tb.predictive(net, found.reference, GRID, SAMPLES).probs[:, 1]
    return [round(p, 5) for p in probs.tolist()]


def row(method: str, seed: int, reference: Tensor) -> dict[str, Any]:
    """Train a method and compare its predictions with the reference's."""
    started = time.process_time()
    run = tb.fit(network, data(), method, seed=seed, progress=False)
    seconds = time.process_time() - started
    probs = run.predict(GRID, DRAWS).probs[:, 1]
    same = (probs > 0.5) == (reference > 0.5)
    return {
        "method": method, "seed": seed, "cpu_seconds": round(seconds, 1),
        "total_variation": round(float((probs - reference).abs().mean()), 4),
        "agreement": round(float(same.double().mean()), 4),
    }  # fmt: skip


def table(content: dict[str, Any]) -> str:
    """The rows as Markdown, nearest first, averaged over seeds."""
    means: list[tuple[float, float, float, str]] = []
    for method in dict.fromkeys(one["method"] for one in content["rows"]):
        rows = [one for one in content["rows"] if one["method"] == method]
        columns = ("total_variation", "agreement", "cpu_seconds")
        off, same, seconds = (sum(one[key] for one in rows) / len(rows) for key in columns)
        means.append((off, same, seconds, method))
    lines = [f"| {m} | {tv:.3f} | {same:.1%} | {s:.1f} |" for tv, same, s, m in sorted(means)]
    head = ["| method | total variation | same class | CPU s |", "| --- | --- | --- | --- |"]
    return "\n".join(head + lines)


def main() -> None:
    """Measure what is missing, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("results/nuts.json"))
    parser.add_argument("--methods", help="comma-separated names to measure anew")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    content: dict[str, Any] = {"chains": [], "rows": []}
    if arguments.json.exists():
        content = json.loads(arguments.json.read_text(encoding="utf-8"))

    def keep() -> None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    for seed in range(len(content["chains"]), CHAINS):
        content["chains"].append(nuts(seed))
        keep()
    chains = torch.tensor(content["chains"])
    content["between_chains"] = round(float((chains[0] - chains[1]).abs().mean()), 4)
    content.update(provenance())
    names = list(tb.METHODS) if arguments.methods is None else arguments.methods.split(",")
    if arguments.methods is not None:
        content["rows"] = [one for one in content["rows"] if one["method"] not in names]
    there = {(one["method"], one["seed"]) for one in content["rows"]}
    for seed in range(arguments.seeds):
        for name in names:
            if (name, seed) not in there:
                content["rows"].append(row(name, seed, chains.mean(0)))
                print(content["rows"][-1], flush=True)
                keep()
    keep()
    print(f"two chains of NUTS: {content['between_chains']}\n\n{table(content)}")


if __name__ == "__main__":
    main()
