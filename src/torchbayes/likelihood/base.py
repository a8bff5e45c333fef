"""What every likelihood gives: a loss, a prediction, and how its targets are counted and checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from torchbayes.predict.results import Predictive

__all__ = ["Likelihood", "at_least_single", "checked_weights", "mean_nll"]


class Likelihood(nn.Module, ABC):
    """A distribution of the targets given the network's outputs.

    It is a module so that its own parameters, such as a learned noise level, are moved and saved too. A
    subclass gives `loss` and `predictive`; one whose `loss` takes no weights works as long as none are given.
    """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean negative log-likelihood of a batch, in nats per example.

        Args:
            outputs: The network's outputs, (examples, …).
            targets: The targets of these examples.
            weights: A factor of each example's negative log-likelihood, (examples,); 1 if None.
        """

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the prediction from outputs of shape (draws, examples, …)."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a `ValueError` if the targets do not fit; `fit` calls it before training.

        Args:
            outputs: The outputs for some examples.
            targets: The targets of all examples that are at hand, not only of these.
        """

    def count(self, targets: Tensor) -> int:
        """Return how many examples these targets are for the mean of `loss`."""
        return len(targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return which targets are the most probable ones, or None if targets are numbers, not labels."""
        return None

    def arguments(self) -> dict[str, Any] | None:
        """Return the arguments that make it anew, as JSON holds them, or None if they cannot be written down.

        Parameters and buffers, which hold what was learned, are no part of them.
        """
        return None

    @torch.no_grad()
    def pool(self, ends: Sequence[dict[str, Tensor]]) -> None:
        """Take one value for each learned parameter in place of those of several networks: their mean.

        Args:
            ends: The learned parameters by name, as the members of an ensemble or several chains ended.
        """
        own = dict(self.named_parameters())
        for name in ends[0]:
            own[name].copy_(torch.stack([values[name] for values in ends]).mean(0))


def checked_weights(weights: Tensor, examples: int) -> Tensor:
    """Return the weights, checked to be one number of at least 0 for each example."""
    if weights.shape != (examples,):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)} for {examples} examples: give one weight per example"
        )
    # Inside vmap nothing can be looked at: `StackedChains.losses` has checked them before.
    if not is_batchedtensor(weights) and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(
            "weights contain a negative, infinite or undefined number: expected finite weights of at least 0"
        )
    return weights


def at_least_single(outputs: Tensor) -> Tensor:
    """Return outputs in at least single precision: a likelihood in half of it has three digits."""
    return outputs.float() if outputs.dtype.itemsize < 4 else outputs


def mean_nll(nll: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over examples of the terms (examples, …), each example's sum times its weight."""
    if weights is None:
        return nll.sum() / len(nll)
    each = nll if nll.dim() == 1 else nll.flatten(1).sum(1)
    return (each * checked_weights(weights, len(each)).to(each)).sum() / len(each)
