"""What a Laplace posterior cannot be built on: said before, or instead of, a wrong result."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchbayes.core.batch import call, map_tensors, slice_batch
from torchbayes.likelihood import Likelihood

__all__ = ["Some", "warn_of_training_mode", "warn_of_untrained"]

_EXAMPLES = 512
# The loss of a trained network cannot fall by so much: by this share, and by so many nats per example.
_SHARE, _NATS = 0.05, 0.02
_STEPS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)


class Some:
    """A few hundred examples from all batches: the data may be sorted by class.

    Args:
        batches: Number of batches, if it is known.
    """

    def __init__(self, batches: int | None) -> None:
        self._each = 16 if batches is None else max(2, -(-_EXAMPLES // batches))
        self._parts: list[tuple[Any, Tensor]] = []
        self._count = 0

    def add(self, inputs: Any, targets: Tensor) -> None:
        """Keep some examples of a batch."""
        if self._count < _EXAMPLES:
            self._parts.append((slice_batch(inputs, 0, self._each), targets[: self._each]))
            self._count += len(self._parts[-1][1])

    def joined(self) -> tuple[Any, Tensor] | None:
        """Return inputs and targets; None if there are too few, or shapes differ from batch to batch."""
        if self._count < 16:
            return None
        leaves, specs = zip(*(tree_flatten(inputs) for inputs, _ in self._parts), strict=True)
        try:
            inputs = [
                torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
                for parts in zip(*leaves, strict=True)
            ]
            return tree_unflatten(inputs, specs[0]), torch.cat([t for _, t in self._parts])
        except (RuntimeError, ValueError):
            return None


def warn_of_training_mode(model: nn.Module) -> None:
    """Warn if a network in training mode would compute something else in evaluation mode."""
    for name, module in model.named_modules():
        drops = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (drops or isinstance(module, _NormBase)):
            warnings.warn(
                f"the network is in training mode, in which {name!r} ({type(module).__name__}) is random or "
                "depends on the batch: Laplace takes it in evaluation mode; call model.eval() to say so",
                UserWarning,
                stacklevel=3,
            )
            return


def warn_of_untrained(
    model: nn.Module, likelihood: Likelihood, weights: Mapping[str, Tensor],
    precision: Mapping[str, Tensor], means: Mapping[str, Tensor], train_size: int, inputs: Any,
    targets: Tensor,
) -> None:  # fmt: skip
    """Warn if a gradient step lowers −log p(targets, weights) much: at its maximum none does.

    The step is computed from one half of the examples and judged by the other: at the maximum, the gradient
    of a few examples is noise, and does not help others.

    Args:
        model: The network, with its weights of the subset alone requiring a gradient; restored afterwards.
        likelihood: The likelihood.
        weights: The weights of the subset.
        precision: The prior's precisions.
        means: The prior's means.
        train_size: Number of training examples.
        inputs: Some of the training inputs.
        targets: Their targets.
    """
    def objective(half: int) -> Tensor:
        part = map_tensors(inputs, lambda t: t[half::2] if t.dim() else t)
        nll = likelihood.loss(call(model, part), targets[half::2])
        pull = sum(
            (precision[n] * (w.double() - means[n]).square()).sum() for n, w in weights.items()
        )
        return nll.double() + 0.5 * pull / train_size

    gradients = torch.autograd.grad(objective(0), list(weights.values()), allow_unused=True)
    direction = {
        name: torch.zeros_like(w) if g is None else g
        for (name, w), g in zip(weights.items(), gradients, strict=True)
    }
    norm = float(sum(g.double().square().sum() for g in direction.values())) ** 0.5
    if norm == 0:
        return
    kept = {name: w.detach().clone() for name, w in weights.items()}
    with torch.no_grad():
        before = float(objective(1))
        best = before
        try:
            for step in _STEPS:
                for name, w in weights.items():
                    # A step of 1 would bring a loss that is linear in it to 0.
                    torch.sub(kept[name], direction[name], alpha=step * abs(before) / norm**2, out=w.data)
                best = min(best, float(objective(1)))
        finally:
            for name, w in weights.items():
                w.data.copy_(kept[name])
    gain = before - best
    if gain > _NATS and gain > _SHARE * abs(before):
        warnings.warn(
            f"the network is not at a maximum of the posterior: a gradient step (norm {norm:.3g}) lowers the "
            f"loss with its prior from {before:.3g} to {best:.3g}, and Laplace's Gaussian belongs at its "
            "minimum; train the network longer, with the prior that you give here",
            UserWarning,
            stacklevel=3,
        )
