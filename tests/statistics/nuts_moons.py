"""What the No-U-Turn Sampler predicts for a small network on 40 points of two moons.

    python tests/statistics/nuts_moons.py        # needs Pyro; writes nuts_moons.json, in about a minute

Kept as a file because NUTS takes longer than all the samplers that are held against it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import torchbayes as tb

FILE = Path(__file__).with_suffix(".json")
COUNT = 40
GRID = torch.cartesian_prod(torch.linspace(-2, 3, 12), torch.linspace(-1.5, 2, 12))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))


def data() -> tuple[Tensor, Tensor]:
    x, y = make_moons(COUNT, noise=0.3, random_state=0)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def nuts(seed: int) -> Tensor:
    """The probability of the second class at every point of the grid, by 400 samples."""
    torch.manual_seed(seed)
    net = network()
    start = tb.Point(tb.snapshot(net))
    found = tb.checks.compare_to_nuts(net, start, data(), GRID, samples=400, warmup=200, seed=seed)
    return tb.predictive(net, found.reference, GRID, 400).probs[:, 1]


def main() -> None:
    chains = [nuts(seed) for seed in range(2)]
    apart = float((chains[0] - chains[1]).abs().mean())
    mean = torch.stack(chains).mean(0)
    content = {"between_chains": round(apart, 4), "probs": [round(p, 4) for p in mean.tolist()]}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
