"""Scores of a posterior on test data: predictions kept on disk, numbers computed from them alone."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.core.storage import atomic_path
from torchbayes.predict.results import ClassPredictive, RegressionPredictive, like_predictions

__all__ = ["Predictions", "RegressionPredictions"]


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
        _write(path, vars(self))

    @classmethod
    def load(cls, path: str | Path) -> Predictions:
        """Read what `save` wrote; never unpickles."""
        with _reading(path):
            arrays = _read(path)
            draws = int(arrays.pop("draws"))
            return cls(**arrays, draws=draws)


@dataclass(frozen=True)
class RegressionPredictions:
    """Predicted values of a test set, draw by draw, and the doubt about an out-of-distribution set.

    Attributes:
        means: What every draw predicts, (draws, examples, targets).
        stds: The noise that every draw predicts, likewise.
        targets: The true values, (examples, targets).
        ood_epistemic: The standard deviation of the predicted mean over draws on the
            out-of-distribution set, or None.
    """

    means: Tensor
    stds: Tensor
    targets: Tensor
    ood_epistemic: Tensor | None = None

    @classmethod
    def of(
        cls, test: RegressionPredictive, targets: Tensor, ood: RegressionPredictive | None = None
    ) -> RegressionPredictions:
        """Keep what is needed of two predictives."""
        means = test.means.cpu()
        return cls(
            means,
            test.stds.cpu(),
            like_predictions(targets.cpu(), means.shape[1:]),
            None if ood is None else ood.epistemic.cpu(),
        )

    def scores(self) -> dict[str, float]:
        """The scores of `torchbayes.metrics.regression_scores`, and of detection by epistemic doubt."""
        table = metrics.regression_scores(self.means, self.stds, self.targets)
        if self.ood_epistemic is not None:
            known = self.means.std(0, correction=0)
            # Several targets are one doubt: the norm of theirs.
            pair = [doubt.flatten(1).norm(dim=1) for doubt in (known, self.ood_epistemic)]
            table["auroc_ood"] = metrics.auroc(*pair)
        return table

    def save(self, path: str | Path) -> None:
        """Write a NumPy archive of plain arrays."""
        _write(path, vars(self))

    @classmethod
    def load(cls, path: str | Path) -> RegressionPredictions:
        """Read what `save` wrote; never unpickles."""
        with _reading(path):
            return cls(**_read(path))


def _write(path: str | Path, fields: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {
        name: value.numpy() if isinstance(value, Tensor) else np.asarray(value)
        for name, value in fields.items()
        if value is not None
    }
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _read(path: str | Path) -> dict[str, Any]:
    with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    try:
        yield
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
