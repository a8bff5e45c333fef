"""Labels that are 0 or 1: one per example, or several that do not exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.likelihood.base import Likelihood, at_least_single, mean_nll
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import like_predictions

__all__ = ["Bernoulli"]


class Bernoulli(Likelihood):
    """A binary label, or several independent ones, from one logit each.

    A network with one logit has outputs (examples,) or (examples, 1); with several labels per example
    (multi-label), (examples, labels, …). The labels of an example are summed: `BCEWithLogitsLoss` takes
    their mean, which is the likelihood to the power 1/labels.

    Args:
        positive_weight: Factor of the negative log-likelihood of labels that are 1, a number or one per
            label, for labels that are rarely 1.

    Example:
        >>> import torch, torchbayes as tb
        >>> logits = torch.zeros(2, 3)
        >>> labels = torch.tensor([[1, 0, 0], [1, 1, 0]])
        >>> round(tb.Bernoulli().loss(logits, labels).item(), 4)   # 3 log 2
        2.0794
        >>> tb.Bernoulli().predictive(torch.tensor([[[2.0], [-1.0]]])).prediction
        tensor([1, 0])
    """

    positive_weight: Tensor | None

    def __init__(self, positive_weight: float | Sequence[float] | Tensor | None = None) -> None:
        super().__init__()
        if positive_weight is not None:
            positive_weight = torch.as_tensor(
                positive_weight, dtype=torch.get_default_dtype()
            ).clone()
            fine = bool(((positive_weight > 0) & positive_weight.isfinite()).all())
            if positive_weight.dim() > 1 or not fine:
                raise ValueError(
                    f"positive_weight is {positive_weight.tolist()}: expected a finite number above 0, or "
                    "one per label"
                )
        self.register_buffer("positive_weight", positive_weight, persistent=False)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean over examples of the binary cross entropy, summed over an example's labels."""
        labels = binary_labels(like_predictions(targets, outputs.shape)).to(outputs.dtype)
        factor = self._factor(outputs)
        if weights is None:
            total = F.binary_cross_entropy_with_logits(
                outputs, labels, pos_weight=factor, reduction="sum"
            )
            return total / len(outputs)
        each = F.binary_cross_entropy_with_logits(
            outputs, labels, pos_weight=factor, reduction="none"
        )
        return mean_nll(each, weights)

    def _factor(self, outputs: Tensor) -> Tensor | None:
        factor = self.positive_weight
        if factor is None or factor.numel() == 1:
            return None if factor is None else factor.reshape(()).to(outputs)
        labels = outputs.shape[1] if outputs.dim() > 1 else 1
        if len(factor) != labels:
            raise ValueError(
                f"positive_weight has {len(factor)} entries but the network has {labels} labels: give a "
                "number, or one per label"
            )
        return factor.to(outputs).reshape(-1, *[1] * (outputs.dim() - 2))

    def predictive(self, outputs: Tensor) -> BinaryPredictive:
        """Average probabilities, not logits; a second dimension of one logit is dropped."""
        if outputs.dim() > 2 and outputs.shape[2] == 1:
            outputs = outputs.squeeze(2)
        logits = at_least_single(outputs)
        yes, no = logits.sigmoid(), (-logits).sigmoid()
        aleatoric = (torch.special.entr(yes) + torch.special.entr(no)).mean(0)
        return BinaryPredictive(yes.mean(0), aleatoric, len(outputs), no.mean(0))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a `ValueError` if the targets are not one 0 or 1 for each logit."""
        shape = torch.Size((len(targets), *outputs.shape[1:]))
        binary_labels(like_predictions(targets, shape))
        self._factor(outputs)

    def arguments(self) -> dict[str, Any]:
        """Return nothing: the weight of a 1 is a buffer."""
        return {}

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which labels are the more probable ones."""
        return (outputs > 0) == (like_predictions(targets, outputs.shape) > 0.5)


def binary_labels(targets: Tensor) -> Tensor:
    """Return the targets, checked to be 0 or 1."""
    if targets.dtype is torch.bool:
        return targets
    bad = (targets != 0) & (targets != 1)
    if bool(bad.any()):
        raise ValueError(
            f"targets contain {targets[bad][0].item():g}, which is no binary label: give 0 or 1, or pass "
            "another likelihood, such as Categorical() for several classes"
        )
    return targets
