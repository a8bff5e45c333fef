"""Check a method with your settings against the exact posterior of a conjugate model of the same size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchbayes.checks.conjugate import LinearRegression
from torchbayes.data.loader import BatchLoader
from torchbayes.posterior import Posterior, Samples
from torchbayes.prior import as_prior
from torchbayes.train.chains import SamplerMethod
from torchbayes.train.fit import fit
from torchbayes.train.method import Method
from torchbayes.train.registry import METHODS, check_options, find_method, method_options

__all__ = ["Verification", "verify"]

_WEIGHTS, _OUTPUTS = 4, 48
_DRAWS = 400
_UPDATES, _EPOCHS = 4000, 10
# A training-set size that is wrong by a factor of 1.4 changes a standard deviation by 18 %.
_STD_TOLERANCE, _MEAN_TOLERANCE = 1.18, 0.5


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        method: Name of the method.
        target: What it was compared with: `posterior` or `mean field`.
        train_size: Number of examples of the problem.
        mean_error: Distance of the mean from the exact one, in exact standard deviations.
        std_ratio: Standard deviation over the exact one, root mean square over weights.
        directions: Standard deviation over the exact posterior's along its axes, the narrowest first.
        trusted: Whether mean and std ratio are within tolerance.
        verdict: The same in plain words.
        limit: What the method's family cannot do here, whatever its settings; empty if that is nothing.
    """

    method: str
    target: str
    train_size: int
    mean_error: float
    std_ratio: float
    directions: tuple[float, ...]
    trusted: bool
    verdict: str
    limit: str = ""


def verify(
    method: str,
    *,
    train_size: int,
    batch_size: int = 128,
    epochs: int | None = None,
    told_size: int | None = None,
    condition: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Verification:
    """Train a method on a linear regression of your size and compare the result with the exact posterior.

    Scale is the most frequent mistake: with a mean loss, the noise of a sampler and the width of a Gaussian
    depend on being told the number of examples. The problem has noise of standard deviation 1 and inputs
    of about unit size, so that the loss has a curvature of about 1.

    Args:
        method: Name of a method that approximates the posterior itself, or the nearest Gaussian with
            independent weights.
        train_size: Number of your training examples (rounded up to an even number).
        batch_size: Examples per update.
        epochs: Passes through the training set; by default 10, and enough for 4,000 updates.
        told_size: Training-set size to give the method instead, to see the effect of a wrong one.
        condition: With 100, an ill-conditioned problem: the posterior's variance along one direction is 100
            times that along another, and the directions are none of the weights'. See `directions`.
        seed: Random seed.
        **options: Options of the method, as for `fit`.

    Example:
        >>> import torchbayes as tb
        >>> settings = {"batch_size": 100, "epochs": 100, "lr": 0.02, "betas": (0.9, 0.02), "damping": 0.0}
        >>> found = tb.verify("vogn", train_size=400, **settings)
        >>> found.trusted, round(found.std_ratio, 1)
        (True, 1.0)
        >>> tb.verify("vogn", train_size=400, told_size=40_000, **settings).trusted
        False
    """
    method_class = find_method(method)
    if method_class.target is None:
        able = ", ".join(name for name, other in METHODS.items() if other.target is not None)
        raise ValueError(f"{method!r} has no exact answer to compare with: choose one of {able}")
    check_options(method_class, options)
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("told_size", told_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected a whole number of at least 1")
    if not 1 <= condition <= 1e6:
        raise ValueError(f"condition is {condition:g}: expected a number from 1 to 1,000,000")
    size = train_size + train_size % 2
    # Kronecker factors couple the outputs, so those methods get a single one.
    problem = LinearRegression.make(
        size, _WEIGHTS, 1 if method_class.posterior_kind == "KroneckerGaussian" else _OUTPUTS, seed,
        condition=condition,
    )  # fmt: skip
    given = {name: o.default for name, o in method_options(method_class).items()} | options
    precision = getattr(as_prior(given["prior"]), "scalar", None)
    if precision is None:
        raise ValueError(f"prior is {given['prior']!r}: the exact answer needs N(0, 1/precision)")
    if (
        given.get("temperature", 1.0) is None
    ):  # a rule of the network's size, which is not that of yours
        given["temperature"] = options["temperature"] = 1.0
    exact = (float(precision), float(given.get("temperature", 1.0)))
    loader = BatchLoader(
        problem.inputs, problem.targets, min(batch_size, size), shuffle=True, seed=seed
    )
    if epochs is None:
        epochs = max(_EPOCHS, math.ceil(_UPDATES / len(loader)))
    if issubclass(method_class, SamplerMethod):
        options = {"chains": 1, **options}  # the outputs are as many chains
    run = fit(
        problem.model, loader, method, epochs=epochs, likelihood=problem.likelihood(), seed=seed,
        train_size=told_size, progress=False, **options,
    )  # fmt: skip
    return _judged(method_class, problem, run.posterior, exact, seed)


def _judged(
    method: type[Method],
    problem: LinearRegression,
    posterior: Posterior,
    exact: tuple[float, float],
    seed: int,
) -> Verification:
    precision, mean = problem.precision(*exact), problem.mean(*exact)
    target = str(method.target)
    variance = precision.inverse().diagonal() if target == "posterior" else 1 / precision.diagonal()
    generator = torch.Generator().manual_seed(seed)
    weights = [draw["weight"] for draw in posterior.draws(_DRAWS, generator)]
    draws = torch.stack(weights).double()  # (draws, outputs, weights)
    # The chains of all outputs together give mean and spread. A Gaussian has a mean for each output, about
    # which its spread is measured.
    chains = isinstance(posterior, Samples)
    own = draws.mean((0, 1), keepdim=True) if chains else posterior.mean()["weight"].double()
    off = (own - mean) / variance.sqrt()
    ratio = float(((draws - own).square().mean((0, 1)) / variance).mean().sqrt())
    mean_error = float(off.square().mean().sqrt())
    widths, axes = torch.linalg.eigh(precision.inverse())
    along = ((draws - own) @ axes).square().mean((0, 1)) / widths
    size = len(problem.inputs)
    problems = _problems(mean_error, ratio, size)
    verdict = "These settings can be trusted: mean and spread are those of the exact posterior."
    if problems:
        verdict = "Do not trust these settings: " + ", and ".join(problems) + "."
    limit = _limit(target, precision, widths, axes, chains)
    directions = tuple(along.sqrt().tolist())
    return Verification(
        method.name, target, size, mean_error, ratio, directions, not problems, verdict, limit
    )


def _limit(target: str, precision: Tensor, widths: Tensor, axes: Tensor, chains: bool) -> str:
    """Say what no settings of a method could change."""
    if target != "posterior":
        best = ((axes**2).T @ (1 / precision.diagonal()) / widths).sqrt()
        if float(best.min()) > 0.7:
            return ""
        return (
            "A Gaussian with independent weights cannot follow directions that mix them: the best one is "
            f"{float(best.min()):.2f} times as wide as the posterior in one direction and "
            f"{float(best.max()):.2f} times in another."
        )
    if chains and float(widths.max() / widths.min()) > 20:
        return (
            "A sampler's scales belong to weights, not to directions that mix them: the widest direction "
            f"needs about {float(widths.max() / widths.min()):.0f} times as many updates as the narrowest, "
            "and in the noise of batches thermostats can make only the mean over directions right."
        )
    return ""


def _problems(mean_error: float, ratio: float, size: int) -> list[str]:
    problems = []
    narrow = ratio < 1 / _STD_TOLERANCE
    if narrow or ratio > _STD_TOLERANCE:
        as_if = max(1, round(size / ratio**2)) if ratio > 0 else math.inf
        also = "damping and temperature" if narrow else "and try a smaller lr or larger batches"
        problems.append(
            f"the posterior is too {'narrow' if narrow else 'wide'} by a factor of "
            f"{1 / ratio if narrow and ratio > 0 else ratio:.2f}, as if there were {as_if:,} training "
            f"examples, not {size:,}; check train_size, {also}"
        )
    if not mean_error <= _MEAN_TOLERANCE:
        problems.append(
            f"its mean is {mean_error:.1f} standard deviations off; train longer, or with another lr"
        )
    return problems
