"""Predictions of binary labels: one per example, or several that do not exclude each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchbayes.predict.results import (
    ClassPredictive,
    LabelPredictive,
    Predictive,
    check_parts,
    like_predictions,
    times,
)

__all__ = ["BinaryPredictive"]


class BinaryPredictive(LabelPredictive):
    """Probabilities of binary labels averaged over draws.

    Args:
        probs: The averaged probability of a 1, (examples,) or (examples, labels, …).
        aleatoric: The entropy of a draw's probabilities, averaged over draws, of the same shape.
        draws: Number of draws.
        complement: The averaged probability of a 0, by default 1 − probs, which loses what is below
            rounding.

    Example:
        >>> import torch, torchbayes as tb
        >>> p = tb.Bernoulli().predictive(torch.tensor([[[4.0]], [[-4.0]]]))   # two draws that disagree
        >>> p.probs.item(), bool(p.epistemic > p.aleatoric)
        (0.5, True)
    """

    def __init__(
        self, probs: Tensor, aleatoric: Tensor, draws: int, complement: Tensor | None = None
    ) -> None:
        super().__init__(probs, aleatoric, draws)
        self._complement = 1 - probs if complement is None else complement

    def _contents(self) -> tuple[str, dict[str, Tensor]]:
        figures = {"confidence": self.confidence, "epistemic": self.epistemic}
        return times(self.probs.shape[1:], "labels"), figures

    @property
    def prediction(self) -> Tensor:
        """The more probable label, 0 or 1."""
        return (self.probs > self._complement).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of the more probable label."""
        return torch.maximum(self.probs, self._complement)

    @property
    def entropy(self) -> Tensor:
        """The entropy of each label's averaged probability in nats: all of its uncertainty."""
        entropy: Tensor = torch.special.entr(self.probs) + torch.special.entr(self._complement)
        return entropy

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log-probability of each target label, of the shape of `probs`."""
        own = like_predictions(targets, self.probs.shape)
        if not bool(((own == 0) | (own == 1)).all()):
            raise ValueError("targets contain a value other than 0 and 1: give binary labels")
        return torch.where(own > 0.5, self.probs, self._complement).log()

    def sample(self, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels, (count, examples, …); those of one example independently."""
        drawn = torch.rand(
            count, *self.probs.shape, generator=generator, dtype=self.probs.dtype,
            device=self.probs.device,
        )  # fmt: skip
        return (drawn < self.probs).long()

    def as_classes(self) -> ClassPredictive:
        """Return the same prediction as one of the classes 0 and 1, with probabilities (examples, 2, …)."""
        probs = torch.stack([self._complement, self.probs], 1)
        return ClassPredictive(probs, self._aleatoric, self.draws)

    def merge(self, other: Predictive) -> BinaryPredictive:
        """Average both predictions, weighted by their number of draws."""
        if not isinstance(other, BinaryPredictive) or other.probs.shape != self.probs.shape:
            raise ValueError(
                "cannot merge these predictions: both must be of binary labels, for the same examples"
            )
        draws = self.draws + other.draws
        pairs = (
            (self.probs, other.probs),
            (self._aleatoric, other._aleatoric),
            (self._complement, other._complement),
        )
        probs, aleatoric, complement = (torch.lerp(a, b, other.draws / draws) for a, b in pairs)
        return BinaryPredictive(probs, aleatoric, draws, complement)

    def subset(self, index: Tensor) -> BinaryPredictive:
        """Return the predictions of the examples at `index`, in its order."""
        parts = (self.probs[index], self._aleatoric[index])
        return BinaryPredictive(*parts, self.draws, self._complement[index])

    @staticmethod
    def cat(parts: Sequence[Predictive]) -> BinaryPredictive:
        """Concatenate the rows of all parts."""
        own = [part for part in parts if isinstance(part, BinaryPredictive)]
        check_parts(parts, own)
        return BinaryPredictive(
            torch.cat([part.probs for part in own]),
            torch.cat([part._aleatoric for part in own]),
            own[0].draws,
            torch.cat([part._complement for part in own]),
        )
