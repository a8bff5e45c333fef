"""How wrong a sampler is at a step size, on a known Gaussian: 10-D, correlated, condition number 100.

Left with exact gradients: every sampler's error falls with its step. Right with noise added to the gradient:
SGLD and SGHMC take it for their own and get too wide; the thermostats of SGNHT and ATMC find it and take it
out. Chains are worth some 8,000 draws, so an error of 3 % may be chance.

Run: python benchmarks/sampler_bias.py     (writes results/sampler-bias.json and docs/images/sampler_bias.png,
     in about two minutes)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core.storage import write_text
from torchbayes.experiments.provenance import provenance
from torchbayes.optim.sampler import Sampler
from torchbayes.plots.figure import COLOURS, INK, axes_row

CHAINS, DIMENSION, CONDITION, NOISE = 2000, 10, 100.0, 64.0
STEPS = (0.025, 0.035, 0.05, 0.07, 0.1)  # per update; the narrowest axis is 0.1 wide
SAMPLERS: dict[str, Callable[[nn.Module, float], Sampler]] = {
    # SGLD has no average step of its own: it moves by √lr.
    "SGLD": lambda net, s: tb.SGLD(net, s**2, train_size=1, prior=FLAT),
    "SGHMC": lambda net, s: tb.SGHMC(net, train_size=1, prior=FLAT, average_step=s),
    "SGNHT": lambda net, s: tb.SGNHT(net, 0.05, train_size=1, prior=FLAT, average_step=s),
    "ATMC": lambda net, s: tb.ATMC(net, 0.05, train_size=1, prior=FLAT, average_step=s),
}
FLAT = tb.GaussianPrior(precision={"theta": torch.zeros(1)})


class Chains(nn.Module):
    """Many chains at once, as the rows of one parameter."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())


def target() -> tuple[Tensor, Tensor]:
    """Axes and variances of the Gaussian."""
    generator = torch.Generator().manual_seed(0)
    axes, _ = torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=generator))
    variances = torch.from_numpy(np.geomspace(1 / CONDITION, 1, DIMENSION)).float()
    return axes, variances


def error(name: str, step: float, noise: float) -> float:
    """The largest error of a variance, over axes, as a share of the exact one."""
    axes, variances = target()
    torch.manual_seed(1)
    # Chains begin in the right distribution and then find their own.
    net = Chains(torch.randn(CHAINS, DIMENSION) * variances.sqrt() @ axes.T)
    sampler = SAMPLERS[name](net, step)
    precision = axes @ torch.diag(1 / variances) @ axes.T
    rate = step**2 / 2 if name == "SGLD" else step**2 / -math.log(0.9)  # of the widest axis
    settle = round(4 / rate)
    total, count = torch.zeros(DIMENSION), 0
    for update in range(3 * settle):
        net.theta.grad = net.theta.detach() @ precision
        if noise:
            net.theta.grad += math.sqrt(noise) * torch.randn(CHAINS, DIMENSION)
        sampler.step()
        if update >= settle and update % 10 == 0:
            total += (net.theta.detach() @ axes).square().mean(0)
            count += 1
    return float((total / count / variances - 1).abs().max())


def measure() -> dict[str, dict[str, list[float]]]:
    """The errors at every step, by the gradient's noise and sampler."""
    found: dict[str, dict[str, list[float]]] = {}
    for noise in (0.0, NOISE):
        for name in SAMPLERS:
            errors = [error(name, step, noise) for step in STEPS]
            print(f"noise {noise:g} {name}: {', '.join(f'{e:.1%}' for e in errors)}", flush=True)
            found.setdefault(f"{noise:g}", {})[name] = errors
    return found


def main(folder: Path) -> None:
    found = measure()
    record = {
        "command": "python benchmarks/sampler_bias.py", **provenance(), "steps": STEPS, "errors": found
    }  # fmt: skip
    (folder / "results").mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    write_text(folder / "results" / "sampler-bias.json", text)
    draw(found, folder / "docs" / "images" / "sampler_bias.png")


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, panels = axes_row(2, width=4.8, height=3.8, sharey=True)
    for panel, rows in zip(panels, found.values(), strict=True):
        for (name, errors), colour, marker in zip(rows.items(), COLOURS, "osD^", strict=False):
            panel.loglog(STEPS, [100 * e for e in errors], color=colour, marker=marker, label=name)
        panel.set_xticks(STEPS, [f"{step:g}" for step in STEPS])
        panel.minorticks_off()
        panel.set_xlabel("average step (the narrowest axis is 0.1 wide)")
        panel.axhline(5, color=INK, lw=0.8, ls=":")
        panel.set_yticks([0.5, 1, 2, 5, 10, 50, 200], ["0.5", "1", "2", "5", "10", "50", "200"])
    panels[0].set_title("exact gradients", fontsize=10)
    panels[1].set_title(f"gradients with noise of variance {NOISE:g}", fontsize=10)
    panels[0].set_ylabel("largest error of a variance (%)")
    panels[0].legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
