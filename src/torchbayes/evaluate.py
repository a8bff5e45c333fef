"""Scores of a posterior on test data: predictions kept on disk, numbers computed from them alone."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.predictions import ClassPredictive
from torchbayes.storage import atomic_path

__all__ = ["Predictions"]


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of a test set and, if there is one, of an out-of-distribution set.

    Attributes:
        probs: The averaged probabilities, (examples, classes).
        aleatoric: The expected entropy of every example.
        targets: The true classes.
        ood_probs: The same for the out-of-distribution set, or None.
        ood_aleatoric: The same for the out-of-distribution set, or None.
        draws: The number of weight draws behind them.
    """

    probs: Tensor
    aleatoric: Tensor
    targets: Tensor
    ood_probs: Tensor | None = None
    ood_aleatoric: Tensor | None = None
    draws: int = 1

    @classmethod
    def of(
        cls, test: ClassPredictive, targets: Tensor, ood: ClassPredictive | None = None
    ) -> Predictions:
        """Keep what is needed of two predictives."""
        return cls(
            test.probs.cpu(),
            test.aleatoric.cpu(),
            targets.cpu(),
            None if ood is None else ood.probs.cpu(),
            None if ood is None else ood.aleatoric.cpu(),
            test.draws,
        )

    @property
    def test(self) -> ClassPredictive:
        """The test set's predictive."""
        return ClassPredictive(self.probs, self.aleatoric, self.draws)

    @property
    def ood(self) -> ClassPredictive | None:
        """The out-of-distribution set's predictive."""
        if self.ood_probs is None or self.ood_aleatoric is None:
            return None
        return ClassPredictive(self.ood_probs, self.ood_aleatoric, self.draws)

    def scores(self) -> dict[str, float]:
        """All scores that the predictions allow; see `torchbayes.metrics.classification_scores`."""
        ood = self.ood
        return metrics.classification_scores(
            self.probs,
            self.targets,
            mutual_information=self.test.epistemic,
            ood_probs=self.ood_probs,
            ood_mutual_information=None if ood is None else ood.epistemic,
        )

    def save(self, path: str | Path) -> None:
        """Write a NumPy archive of plain arrays."""
        arrays: dict[str, Any] = {
            name: value.numpy() if isinstance(value, Tensor) else np.asarray(value)
            for name, value in vars(self).items()
            if value is not None
        }
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Predictions:
        """Read what `save` wrote; never unpickles."""
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in file.files}
            draws = int(arrays.pop("draws"))
            return cls(**arrays, draws=draws)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise ValueError(
                f"{path} is not a file of predictions: run `torchbayes evaluate`"
            ) from error
