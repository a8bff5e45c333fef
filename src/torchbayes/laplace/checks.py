"""What a Laplace posterior cannot be built on: said before, or instead of, a wrong result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchbayes.core.batch import map_tensors, slice_batch
from torchbayes.laplace.network import Network
from torchbayes.laplace.outputs import best_constant, factors_of
from torchbayes.likelihood import Likelihood

__all__ = ["Some", "check_types", "warn_of_training_mode", "warn_of_untrained"]

_EXAMPLES = 256
# The loss of a trained network cannot fall by so much: by this share, and by so many nats per example.
_SHARE, _NATS = 0.05, 0.02
_STEPS = (0.5, 0.1, 0.02, 0.004)


class Some:
    """A few hundred examples from all batches: the data may be sorted by class.

    Args:
        batches: Number of batches, if it is known.
    """

    def __init__(self, batches: int | None) -> None:
        self._each = 16 if batches is None else max(2, -(-_EXAMPLES // batches))
        self._parts: list[tuple[Any, Tensor, Tensor]] = []
        self._count, self._weighted = 0, False

    def add(self, inputs: Any, targets: Tensor, weights: Tensor | None) -> None:
        """Keep some examples of a batch."""
        if not self.full:
            # Copies: a view would keep all of its batch, or of the data in memory.
            labels = targets[: self._each].clone()
            own = labels.new_ones(len(labels), dtype=torch.get_default_dtype())
            if weights is not None:
                own, self._weighted = weights[: self._each].clone(), True
            some = map_tensors(slice_batch(inputs, 0, self._each), torch.clone)
            self._parts.append((some, labels, own))
            self._count += len(labels)

    @property
    def full(self) -> bool:
        """Whether there are enough."""
        return self._count >= _EXAMPLES

    def joined(self) -> tuple[Any, Tensor, Tensor | None] | None:
        """Return inputs, targets and weights, if any; None if they are too few or of many shapes."""
        if self._count < 16:
            return None
        leaves, specs = zip(*(tree_flatten(part[0]) for part in self._parts), strict=True)
        try:
            inputs = [
                torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
                for parts in zip(*leaves, strict=True)
            ]
            targets, weights = (torch.cat([part[i] for part in self._parts]) for i in (1, 2))
            return tree_unflatten(inputs, specs[0]), targets, weights if self._weighted else None
        except (RuntimeError, ValueError):
            return None


def check_types(weights: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` for weights in half precision."""
    for name, weight in weights.items():
        if weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"weight {name!r} is {weight.dtype}, in which curvature and eigenvalues are mostly rounding: "
                "give the network in single precision, model.float()"
            )


def warn_of_training_mode(model: nn.Module) -> None:
    """Warn if a network in training mode would compute something else in evaluation mode."""
    for name, module in model.named_modules():
        drops = (isinstance(module, _DropoutNd) and module.p > 0) or (
            isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
        )
        if module.training and (drops or isinstance(module, _NormBase)):
            warnings.warn(
                f"the network is in training mode, in which {name!r} ({type(module).__name__}) is random or "
                "depends on the batch: Laplace takes it in evaluation mode; call model.eval() to say so",
                UserWarning,
                stacklevel=3,
            )
            return


def warn_of_untrained(
    network: Network, likelihood: Likelihood, weights: Mapping[str, Tensor],
    precision: Mapping[str, Tensor], means: Mapping[str, Tensor], train_size: int, inputs: Any,
    targets: Tensor, weighing: Tensor | None,
) -> None:  # fmt: skip
    """Warn if the loss is that of a constant output, or if a gradient step lowers it much.

    A network that predicts no better than a constant has learned nothing from its inputs; where it has many
    layers or classes, a single step may help it little.

    At a minimum no step helps. It has to lower both the loss and the loss with the prior, because a network
    may have been trained without this prior. It is computed from one half of the examples and judged by the
    other: at the minimum, the gradient of a few examples is noise, and does not help others.

    Args:
        network: The network, with its weights of the subset alone requiring a gradient; restored afterwards.
        likelihood: The likelihood.
        weights: The weights of the subset.
        precision: The prior's precisions.
        means: The prior's means.
        train_size: Number of training examples.
        inputs: Some of the training inputs.
        targets: Their targets.
        weighing: Their weights, if they have any.
    """

    def loss(half: int) -> Tensor:
        part = map_tensors(inputs, lambda t: t[half::2] if t.dim() else t)
        given = () if weighing is None else (weighing[half::2],)
        return likelihood.loss(network(part), targets[half::2], *given)

    flat = _Prior(weights, {n: 0 * delta for n, delta in precision.items()}, means, train_size)
    own = _Prior(weights, precision, means, train_size)
    found = [_descent(loss, prior) for prior in (flat, own)]
    norm, before, after = found[-1]
    if all(b - a > max(_NATS, _SHARE * abs(b)) for _, b, a in found):
        _warn(f"a gradient step (norm {norm:.3g}) lowers its loss from {before:.3g} to {after:.3g}")
        return
    losses = _constant_loss(network, likelihood, inputs, targets, weighing)
    if losses is not None and losses[0] >= losses[1]:
        _warn(
            f"its loss is {losses[0]:.4g}, no lower than the {losses[1]:.4g} of the best constant output "
            f"(norm of the gradient {found[0][0]:.3g})"
        )


def _warn(reason: str) -> None:
    warnings.warn(
        f"the network is not at a maximum of the posterior: {reason}, and Laplace's Gaussian belongs at the "
        "minimum of the loss; train the network longer, with the prior that you give here",
        UserWarning,
        stacklevel=4,
    )


@torch.no_grad()
def _constant_loss(
    network: Network, likelihood: Likelihood, inputs: Any, targets: Tensor, weights: Tensor | None
) -> tuple[float, float] | None:
    """Return the losses of the network and of the best constant output, if there is a formula for that."""
    outputs = network(inputs)
    factors = factors_of(likelihood, outputs, targets, weights)
    constant = best_constant(likelihood, outputs, targets, factors)
    if constant is None:
        return None
    given = () if weights is None else (weights,)
    own, other = (float(likelihood.loss(f, targets, *given)) for f in (outputs, constant))
    return own, other


class _Prior:
    """−log p(w)/N up to a constant, for some weights."""

    def __init__(
        self, weights: Mapping[str, Tensor], precision: Mapping[str, Tensor],
        means: Mapping[str, Tensor], train_size: int,
    ) -> None:  # fmt: skip
        self.weights = list(weights.values())
        self._terms = [
            (w, (precision[n] / train_size).to(w), means[n].to(w)) for n, w in weights.items()
        ]

    def value(self) -> float:
        return sum(float((rate * (w - m).square()).sum()) / 2 for w, rate, m in self._terms)

    def gradients(self) -> list[Tensor]:
        return [rate * (w - m) for w, rate, m in self._terms]


def _descent(loss: Callable[[int], Tensor], prior: _Prior) -> tuple[float, float, float]:
    """Return the gradient's norm for half 0, and the loss of half 1 before and after the best step."""
    weights = prior.weights
    found = torch.autograd.grad(loss(0), weights, allow_unused=True)
    with torch.no_grad():
        gradients = [
            pull if g is None else g + pull
            for g, pull in zip(found, prior.gradients(), strict=True)
        ]
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        kept = [w.detach().clone() for w in weights]
        before = float(loss(1)) + prior.value()
        best = before
        try:
            for step in _STEPS if norm > 0 else ():
                # A step of 1 would bring a loss that is linear in it to 0.
                rate = step * abs(before) / norm**2
                for w, own, g in zip(weights, kept, gradients, strict=True):
                    torch.sub(own, g, alpha=rate, out=w.data)
                best = min(best, float(loss(1)) + prior.value())
        finally:
            for w, own in zip(weights, kept, strict=True):
                w.data.copy_(own)
    return norm, before, best
