"""The arguments of `Laplace`: what they denote, and one sentence for those that denote nothing."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.arrays import as_inputs
from torchbayes.core.batch import Inputs, split_batch
from torchbayes.laplace.diagonal import Diagonal
from torchbayes.laplace.evidence import by_tensor
from torchbayes.laplace.full import Full
from torchbayes.laplace.kronecker import Kronecker
from torchbayes.laplace.low_rank import LowRank
from torchbayes.laplace.outputs import EXACT_UP_TO, draws_labels, has_root
from torchbayes.laplace.structure import Structure
from torchbayes.laplace.subset import Subset
from torchbayes.likelihood import (
    Categorical,
    Likelihood,
    Observation,
    as_likelihood,
    inferred_likelihood,
)
from torchbayes.posterior import Weights
from torchbayes.prior import GaussianPrior, Prior, as_prior

__all__ = [
    "CURVATURES", "STRUCTURES", "PriorLike", "check_outputs", "check_size", "curvature_for", "in_copy",
    "input_batches", "likelihood_for", "one_of", "prior_terms", "structure_for",
]  # fmt: skip

STRUCTURES = ("diagonal", "kronecker", "full", "low_rank")
CURVATURES = ("ggn", "sampled", "empirical")

_FULL_UP_TO = 20_000  # weights, whose matrix takes 3 GB in double precision

PriorLike = Prior | float | Mapping[str, float | Tensor] | Tensor


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a `ValueError` that suggests a name if the value is not known."""
    if value not in known:
        close = difflib.get_close_matches(str(value), known, 1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what} is {value!r}: expected {', '.join(known)}{hint}")


def in_copy(subset: Subset, network: nn.Module, twin: nn.Module) -> Subset:
    """Replace modules of the user's network by those of the copy."""
    if isinstance(subset, str):
        return subset
    twins = dict(zip(map(id, network.modules()), twin.modules(), strict=True))
    if isinstance(subset, nn.Module):
        return twins.get(id(subset), subset)
    return [each if isinstance(each, str) else twins.get(id(each), each) for each in subset]


def likelihood_for(
    given: Any, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> Likelihood:
    """Return a copy of the likelihood that is given, or the one that `fit` would infer."""
    if given is None:
        return inferred_likelihood(outputs, targets)
    likelihood = copy.deepcopy(as_likelihood(given))
    if weights is not None and "weights" not in inspect.signature(likelihood.loss).parameters:
        raise ValueError(
            f"there are weights of the examples, but {type(likelihood).__name__}.loss does not take any: "
            "give it a third argument, weights"
        )
    return likelihood


def check_outputs(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Raise an error of one sentence if outputs, targets and likelihood do not fit."""
    if isinstance(likelihood, Categorical) and targets.is_floating_point():
        raise ValueError(
            f"targets are {targets.dtype}, which are not class labels: convert them to int64, or pass "
            "likelihood=torchbayes.GaussianNoise(…) for regression"
        )
    if isinstance(likelihood, Observation):
        try:
            likelihood.distribution(outputs)
        except Exception as error:
            raise TypeError(
                "likelihood is a function that gives no distribution of the targets "
                f"({str(error).splitlines()[0]}): a loss is no likelihood; pass torchbayes.Categorical(), "
                "GaussianNoise(…), or a function from outputs to a torch distribution"
            ) from error
    likelihood.loss(outputs, targets[: len(outputs)])


def curvature_for(given: str | None, likelihood: Likelihood, outputs: Tensor) -> str:
    """Return the curvature that is given, or the default for these outputs."""
    exact = has_root(likelihood, outputs)
    if not draws_labels(likelihood) and given in (None, "sampled"):
        raise ValueError(
            f"labels cannot be drawn from a {type(likelihood).__name__}: use curvature='empirical', or give "
            "the likelihood as a function from outputs to a torch distribution"
        )
    if given is None:
        return "ggn" if exact and outputs[0].numel() <= EXACT_UP_TO else "sampled"
    if given == "ggn" and not exact:
        raise ValueError(
            f"there is no exact Gauss–Newton matrix for {type(likelihood).__name__} with outputs of shape "
            f"{tuple(outputs.shape[1:])}: use curvature='sampled'"
        )
    return given


def structure_for(name: str, weights: Weights, rank: int) -> Structure:
    """Make the structure of that name."""
    if name == "low_rank":
        return LowRank(weights, rank)
    count = sum(w.numel() for w in weights.values())
    if name == "full" and count > _FULL_UP_TO:
        raise ValueError(
            f"structure='full' has a matrix of {count:,} × {count:,} weights, "
            f"{8 * count**2 / 2**30:,.0f} GB: choose a subset of up to {_FULL_UP_TO:,} weights, such as "
            "'last_layer', or another structure"
        )
    kinds: dict[str, Callable[[Weights], Structure]] = {
        "diagonal": Diagonal, "kronecker": Kronecker, "full": Full
    }  # fmt: skip
    return kinds[name](weights)


def check_size(seen: int, given: int | None, known: int | None) -> None:
    """Raise a `ValueError` if not every example was seen once."""
    if given is not None and seen != given:
        raise ValueError(
            f"train_size is {given} but the data have {seen} examples: give all of the training data once"
        )
    if known is not None and seen != known:
        raise ValueError(
            f"the loader gave {seen} of its {known} examples: give every example once (drop_last=False, no "
            "sampler that leaves some out), because their number is the weight of the data against the prior"
        )


def prior_terms(value: PriorLike, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the precision and the mean of every weight tensor, in double precision."""
    means = dict.fromkeys(weights, torch.zeros((), dtype=torch.float64))
    if isinstance(value, Mapping):
        missing = next((name for name in weights if name not in value), None)
        if missing is not None:
            raise ValueError(
                f"the prior has no precision for weight {missing!r}: give one for each"
            )
        entries = {name: torch.as_tensor(value[name]).double() for name in weights}
    elif isinstance(value, Tensor):
        if value.dim() > 1 or (value.dim() == 1 and len(value) != len(weights)):
            raise ValueError(
                f"the prior's precision has shape {tuple(value.shape)}: expected one number, or "
                f"{len(weights)}, one for each weight tensor"
            )
        entries = by_tensor(value.double(), weights)
    else:
        prior = as_prior(value)
        if not isinstance(prior, GaussianPrior):
            raise TypeError(
                f"Laplace takes a Gaussian prior, not a {type(prior).__name__}: pass a precision or a "
                "GaussianPrior(…)"
            )
        if prior.scalar is not None:
            entries = by_tensor(torch.tensor(prior.scalar, dtype=torch.float64), weights)
        else:
            moments_of = {n: prior.moments(n, w.detach().double()) for n, w in weights.items()}
            means = {name: mean for name, (mean, _) in moments_of.items()}
            entries = {name: precision for name, (_, precision) in moments_of.items()}
    for name, delta in entries.items():
        if not bool(((delta > 0) & delta.isfinite()).all()):
            raise ValueError(
                f"the prior's precision of {name!r} is {float(delta.detach().min()):g}: Laplace needs a "
                "finite one above 0, because data alone do not determine all weights"
            )
    return {
        name: delta.reshape(()) if delta.numel() == 1 and delta.dim() else delta
        for name, delta in entries.items()
    }, means


def input_batches(inputs: Any) -> Iterator[Inputs]:
    """Yield the batches of a loader, or the inputs as one batch."""
    inputs = as_inputs(inputs)
    if isinstance(inputs, (Tensor, tuple, Mapping)) or not isinstance(inputs, Iterable):
        yield inputs
    else:
        for batch in inputs:
            yield split_batch(batch)[0]
