"""How pairs of weights vary together over the draws of a posterior.

Ukai et al. 2019, section 5.6 and Figure 9: correlations of random pairs of weights within a residual
block and between two, and scatter plots of single pairs with their histograms. Bayes by Backprop's
weights are independent by construction; a hypernetwork's are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchbayes.core.names import named_parameters
from torchbayes.plots.figure import COLOURS, INK, plain
from torchbayes.posterior import Generated, Point, Posterior, Samples, Weights
from torchbayes.posterior.posterior import plain_network
from torchbayes.variational.residual_blocks import find_blocks

__all__ = [
    "WeightCorrelations", "random_weights", "weight_correlations", "weight_pair_figure",
    "weight_samples",
]  # fmt: skip


@dataclass(frozen=True)
class WeightCorrelations:
    """Mean absolute correlations of random pairs of weights.

    Attributes:
        within: Of two weights of the same block.
        between: Of two weights of different blocks; None if there is only one block.
        floor: Value for independent weights with as many draws, √(2 / (π·draws)).
    """

    within: float
    between: float | None
    floor: float


def weight_samples(
    posterior: Posterior,
    places: Mapping[str, Tensor],
    draws: int,
    generator: torch.Generator | None = None,
) -> Weights:
    """Sample single weights, (draws, places) for each name.

    Args:
        posterior: Posterior to draw from.
        places: By weight name, indices into `weight.flatten()`.
        draws: Number of draws; a finite posterior, such as an ensemble, gives each member once.
        generator: Random generator.
    """
    if isinstance(posterior, Generated) and all(name in posterior.groups for name in places):
        return posterior.entries(places, draws, generator)
    rows: dict[str, list[Tensor]] = {name: [] for name in places}
    for draw in posterior.draws(draws, generator):
        for name, index in places.items():
            rows[name].append(draw[name].flatten()[index])
    return {name: torch.stack(values) for name, values in rows.items()}


def weight_correlations(
    model: nn.Module,
    posterior: Posterior,
    *,
    pairs: int = 1000,
    draws: int = 1000,
    generator: torch.Generator | None = None,
) -> WeightCorrelations:
    """Compute the mean |Pearson correlation| of random pairs of weights, within and between blocks.

    Args:
        model: Network that the posterior belongs to; one without residual blocks is compared by layer.
        posterior: Posterior to draw from.
        pairs: Number of random pairs of each kind (the paper: 1000).
        draws: Number of draws.
        generator: Random generator for pairs and draws.
    """
    network = plain_network(model)
    if isinstance(posterior, Point | Samples):
        raise ValueError(
            f"{posterior!r} has too few networks to correlate weights: use a posterior that gives fresh draws"
        )
    groups = _weights_by_block(network, posterior, find_blocks(network, None))
    sizes = {name: p.numel() for name, p in named_parameters(network).items()}
    names = list(groups)
    chosen: list[tuple[str, int]] = []

    def pick(block: str) -> None:
        weights = groups[block]
        counts = torch.tensor([sizes[name] for name in weights])
        at = _random(int(counts.sum()), generator)
        for name, count in zip(weights, counts.tolist(), strict=True):
            if at < count:
                chosen.append((name, at))
                return
            at -= count

    for _ in range(pairs):
        block = names[_random(len(names), generator)]
        pick(block)
        pick(block)
    for _ in range(pairs if len(names) > 1 else 0):
        one = _random(len(names), generator)
        other = (one + 1 + _random(len(names) - 1, generator)) % len(names)
        pick(names[one])
        pick(names[other])
    values = _columns(posterior, chosen, draws, generator)
    within = _mean_correlation(values[:, : 2 * pairs])
    between = _mean_correlation(values[:, 2 * pairs :]) if len(names) > 1 else None
    return WeightCorrelations(within, between, float(np.sqrt(2 / (np.pi * draws))))


def random_weights(network: nn.Module, posterior: Posterior) -> list[str]:
    """Return the names of the weights that a hypernetwork generates, else of matrices and kernels."""
    if isinstance(posterior, Generated):
        return list(posterior.generated)
    held = posterior._shapes()
    return [n for n, p in named_parameters(network).items() if p.dim() > 1 and n in held]


def _weights_by_block(
    network: nn.Module, posterior: Posterior, blocks: list[str]
) -> dict[str, list[str]]:
    random = random_weights(network, posterior)
    groups = {b: [n for n in random if n.startswith(f"{b}.")] for b in blocks}
    groups = {block: names for block, names in groups.items() if names}
    return groups if groups else {name: [name] for name in random}


def _random(below: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(below, (), generator=generator))


def _columns(
    posterior: Posterior,
    chosen: list[tuple[str, int]],
    draws: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample the chosen weights as columns, (draws, chosen)."""
    places: dict[str, list[int]] = {}
    order: list[tuple[str, int]] = []
    for name, place in chosen:
        entries = places.setdefault(name, [])
        order.append((name, len(entries)))
        entries.append(place)
    index = {name: torch.tensor(entries) for name, entries in places.items()}
    samples = weight_samples(posterior, index, draws, generator)
    return torch.stack([samples[name][:, at] for name, at in order], 1).double().cpu()


def _mean_correlation(values: Tensor) -> float:
    one, two = values[:, 0::2], values[:, 1::2]
    one, two = one - one.mean(0), two - two.mean(0)
    size = (one.square().sum(0) * two.square().sum(0)).sqrt()
    real = size > 0  # a weight that never varies is correlated with nothing
    return float(((one * two).sum(0)[real] / size[real]).abs().mean()) if bool(real.any()) else 0.0


def weight_pair_figure(
    posteriors: Mapping[str, Posterior],
    pair: tuple[tuple[str, int], tuple[str, int]],
    *,
    draws: int = 1000,
    generator: torch.Generator | None = None,
) -> Figure:
    """Draw scatter plots of a pair of weights over draws, with their histograms (the paper's Figure 9).

    Args:
        posteriors: Posteriors by name, such as hypernetworks with two latents and Bayes by Backprop.
        pair: Two weights, each as the name of its tensor and its index in `weight.flatten()`.
        draws: Draws from each; a finite posterior, such as an ensemble, is shown with all its members.
        generator: Random generator.
    """
    if not posteriors:
        raise ValueError("there are no posteriors to draw: give at least one by name")
    figure = Figure(figsize=(3.6 * len(posteriors), 3.8), dpi=120, layout="constrained")
    panels = figure.subplots(
        2, 2 * len(posteriors), squeeze=False,
        width_ratios=[4, 1] * len(posteriors), height_ratios=[1, 4],
    )  # fmt: skip
    for number, (label, posterior) in enumerate(posteriors.items()):
        values = _columns(posterior, list(pair), draws, generator).numpy()
        colour = COLOURS[number % len(COLOURS)]
        top, corner = panels[0, 2 * number], panels[0, 2 * number + 1]
        middle, side = panels[1, 2 * number], panels[1, 2 * number + 1]
        corner.set_axis_off()
        spread = values.std(0)
        few = len(values) < min(draws, 30)
        middle.scatter(
            values[:, 0], values[:, 1], s=30 if few else 5, color=colour, alpha=0.9 if few else 0.4,
            linewidths=0,
        )  # fmt: skip
        middle.set_xlabel(_named(pair[0]), fontsize=8)
        middle.set_ylabel(_named(pair[1]), fontsize=8)
        middle.locator_params(nbins=4)
        plain(middle)
        for axes, column, direction in ((top, 0, "vertical"), (side, 1, "horizontal")):
            if spread[column] > 0:
                axes.hist(
                    values[:, column], bins=40, color=colour, alpha=0.6, orientation=direction
                )
            axes.set_axis_off()
        top.sharex(middle)
        side.sharey(middle)
        if few:  # a correlation of so few is meaningless
            text = f"{len(values)} networks" if len(values) > 1 else "a point"
        else:
            r = np.corrcoef(values.T)[0, 1] if (spread > 0).all() else float("nan")
            text = f"correlation {r:+.2f}" if np.isfinite(r) else "no spread"
        top.set_title(f"{label}\n{text}", fontsize=10, color=INK)
    return figure


def _named(weight: tuple[str, int]) -> str:
    return f"{weight[0].removesuffix('.weight')}[{weight[1]}]"
