"""The averaged prediction after 1, 2, 4, … of its draws, without keeping every draw.

`predictive` merges draws one group after another. A `RunningPredictive` records the running average at
every power of two: log₂(draws) + 1 tables of probabilities instead of one for each draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchbayes.likelihood import Categorical
from torchbayes.predict.results import ClassPredictive, Predictive

__all__ = ["RunningCategorical", "RunningPredictive"]


class RunningPredictive(ClassPredictive):
    """Class probabilities that keep their values after fewer draws.

    Args:
        probs: The averaged probabilities, (examples, classes).
        aleatoric: The entropy of a draw's probabilities, averaged over draws.
        draws: Number of draws.
        stages: The averages over the first 1, 2, 4, … draws, by their number.
        each: The probabilities of every draw, (draws, examples, classes), until they are merged.
    """

    def __init__(
        self, probs: Tensor, aleatoric: Tensor, draws: int, stages: dict[int, Tensor],
        each: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(probs, aleatoric, draws)
        self._stages, self._each = stages, each

    @property
    def stages(self) -> dict[int, Tensor]:
        """The averages over the first 1, 2, 4, … draws and over all of them."""
        return {**self._stages, self.draws: self.probs}

    def merge(self, other: Predictive) -> RunningPredictive:
        """Average both predictions; `other`'s draws come after these."""
        whole = super().merge(other)
        assert isinstance(other, RunningPredictive)
        assert other._each is not None
        self._each = None  # once merged, single draws are not needed again
        stages = self._stages | _stages(other._each, self.draws, self.probs)
        return RunningPredictive(whole.probs, whole.aleatoric, whole.draws, stages)

    @staticmethod
    def cat(parts: Sequence[Predictive]) -> RunningPredictive:
        """Concatenate the rows of all parts."""
        own = [part for part in parts if isinstance(part, RunningPredictive)]
        whole = ClassPredictive.cat(own if len(own) == len(parts) else parts)
        stages = {n: torch.cat([part._stages[n] for part in own]) for n in own[0]._stages}
        return RunningPredictive(whole.probs, whole.aleatoric, whole.draws, stages)


def _stages(each: Tensor, before: int, average: Tensor | None) -> dict[int, Tensor]:
    """Return the running averages at the powers of two that more draws pass."""
    result: dict[int, Tensor] = {}
    stage = 1 << before.bit_length() if before else 1
    while stage <= before + len(each):
        total = each[: stage - before].sum(0)
        result[stage] = (total if average is None else total + before * average) / stage
        stage *= 2
    return result


class RunningCategorical(Categorical):
    """Class logits whose averaged prediction is a `RunningPredictive`.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 2), 0.5)})
        >>> p = tb.predictive(model, q, torch.randn(5, 2), samples=6, likelihood=RunningCategorical())
        >>> list(p.stages)
        [1, 2, 4, 6]
    """

    def predictive(self, outputs: Tensor) -> RunningPredictive:
        """Average probabilities, not logits, and record the average at powers of two."""
        whole = super().predictive(outputs)
        each = outputs.float().softmax(2) if outputs.dtype.itemsize < 4 else outputs.softmax(2)
        return RunningPredictive(
            whole.probs, whole.aleatoric, whole.draws, _stages(each, 0, None), each
        )
