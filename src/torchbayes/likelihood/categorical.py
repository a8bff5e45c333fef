"""One of several classes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.likelihood.base import Likelihood, at_least_single, mean_nll
from torchbayes.predict.results import ClassPredictive

__all__ = ["Categorical"]

_NO_LABEL = -100  # what `cross_entropy` ignores unless told otherwise


def _check_classes(shape: torch.Size) -> None:
    if not shape or shape[0] < 2:
        raise ValueError(
            f"the network gives outputs of shape {tuple(shape)} per example, but class logits are at least "
            "2: pass likelihood=torchbayes.Bernoulli() for a binary label, Poisson() for counts, "
            "GaussianNoise(…) for regression, or give it an output per class"
        )


class Categorical(Likelihood):
    """One of several classes, from logits: (examples, classes, …) as `cross_entropy` orders them.

    Several positions of an example, such as pixels, are summed. Ignored positions add nothing: among plain
    logits (examples, classes) the mean is over the other examples; for maps it is over all examples. `fit`
    counts every example, so that an example without a label is one that says nothing.

    Args:
        ignore_index: Label of examples or positions that are not labelled, such as -100; None for none.
        class_weight: Factor of the negative log-likelihood of each class's examples, (classes,). The sum is
            divided by the number of examples, not by the sum of the weights as in `CrossEntropyLoss`.

    Example:
        >>> import torch, torchbayes as tb
        >>> logits = torch.zeros(2, 4)
        >>> round(tb.Categorical().loss(logits, torch.tensor([0, 3])).item(), 4)   # log 4
        1.3863
        >>> partly = tb.Categorical(ignore_index=-100)
        >>> round(partly.loss(logits, torch.tensor([0, -100])).item(), 4)
        1.3863
    """

    class_weight: Tensor | None

    def __init__(
        self,
        ignore_index: int | None = None,
        class_weight: Tensor | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index = None if ignore_index is None else operator.index(ignore_index)
        if class_weight is not None:
            class_weight = torch.as_tensor(class_weight, dtype=torch.get_default_dtype()).clone()
            if class_weight.dim() != 1 or not bool(
                ((class_weight >= 0) & class_weight.isfinite()).all()
            ):
                raise ValueError(
                    f"class_weight is {class_weight.tolist()}: expected one finite number of at least 0 per "
                    "class"
                )
        self.register_buffer("class_weight", class_weight, persistent=False)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the cross entropy, summed over the positions of an example if it has several."""
        _check_classes(outputs.shape[1:])
        if targets.dtype is not torch.int64 and not targets.is_floating_point():
            targets = targets.long()
        try:
            return self._loss(outputs, targets, weights)
        except (
            IndexError
        ):  # torch's own does not say what to do; batches of a loader are not checked before
            self.check(outputs, targets)
            raise

    def _loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        factors = self._factors(outputs)
        if weights is None and self.ignore_index is None:
            if outputs.dim() == 2 and factors is None:
                return F.cross_entropy(outputs, targets)
            return F.cross_entropy(outputs, targets, factors, reduction="sum") / len(outputs)
        ignored = _NO_LABEL if self.ignore_index is None else self.ignore_index
        each = F.cross_entropy(outputs, targets, factors, ignore_index=ignored, reduction="none")
        mean = mean_nll(each, weights)
        if self.ignore_index is None or targets.dim() != 1:
            return mean
        return mean * len(targets) / (targets != ignored).sum().clamp_min(1)

    def _factors(self, outputs: Tensor) -> Tensor | None:
        factors = self.class_weight
        if factors is None:
            return None
        if len(factors) != outputs.shape[1]:
            raise ValueError(
                f"class_weight has {len(factors)} entries but the network has {outputs.shape[1]} classes: "
                "give one weight per class"
            )
        return factors.to(outputs)

    def predictive(self, outputs: Tensor) -> ClassPredictive:
        """Average probabilities, not logits."""
        _check_classes(outputs.shape[2:])
        probs = at_least_single(outputs).softmax(2)
        aleatoric = torch.special.entr(probs).sum(2).mean(0)
        return ClassPredictive(probs.mean(0), aleatoric, len(outputs))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a `ValueError` if the targets are not labels of the network's classes."""
        _check_classes(outputs.shape[1:])
        self._factors(outputs)
        classes, wanted = outputs.shape[1], tuple(outputs.shape[2:])
        if tuple(targets.shape[1:]) != wanted:
            hint = "change their shape"
            if targets.shape[1:] == (classes,):
                hint = "pass targets.argmax(1)"
            elif targets.shape[1:] == (1,):
                hint = "pass targets[:, 0]"
            raise ValueError(
                f"the targets have shape {tuple(targets.shape)}, but one label for each output is "
                f"{(len(targets), *wanted)}: {hint}"
            )
        if targets.is_floating_point():
            raise ValueError(
                f"targets are {targets.dtype}, which are not class labels: convert them to int64, or pass "
                "likelihood=torchbayes.GaussianNoise(…) for regression"
            )
        known = targets if self.ignore_index is None else targets[targets != self.ignore_index]
        if known.numel() == 0:
            raise ValueError(f"every target is {self.ignore_index}, the ignored label: label some")
        for bad in (int(known.min()), int(known.max())):
            if not 0 <= bad < classes:
                raise ValueError(
                    f"label {bad} is out of range: the network has {classes} classes, 0 to {classes - 1}; "
                    "if it marks what is not labelled, pass "
                    f"likelihood=torchbayes.Categorical(ignore_index={bad})"
                )

    def count(self, targets: Tensor) -> int:
        """Return the number of examples; of plain labels, those that are not ignored."""
        if self.ignore_index is None or targets.dim() != 1:
            return len(targets)
        return int((targets != self.ignore_index).sum())

    def arguments(self) -> dict[str, Any]:
        """Return the ignored label; the weights of the classes are a buffer."""
        return {"ignore_index": self.ignore_index}

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which labels, of those that are not ignored, have the largest logit."""
        right = outputs.argmax(1) == targets
        return right if self.ignore_index is None else right[targets != self.ignore_index]
