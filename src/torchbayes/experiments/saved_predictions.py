"""Predictions saved to disk, and the scores that are computed from them alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchbayes import metrics
from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_npz
from torchbayes.core.storage import atomic_path
from torchbayes.posthoc.positions import position_rows
from torchbayes.predict.results import ClassPredictive, RegressionPredictive, like_predictions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Predictions", "RegressionPredictions"]


class _Archive:
    """A dataclass of tensors and whole numbers, saved as a NumPy archive."""

    def save(self, path: str | Path) -> None:
        """Write a NumPy archive of plain arrays."""
        arrays: dict[str, Any] = {k: np.asarray(v) for k, v in vars(self).items() if v is not None}
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read an archive written by `save`; never unpickles."""
        try:
            arrays = read_npz(Path(path), "run `torchbayes evaluate`")
            # Only whole numbers are saved without dimensions.
            return cls(**{k: torch.from_numpy(v) if v.ndim else int(v) for k, v in arrays.items()})
        except (ValueError, TypeError) as error:
            raise FileError(
                f"{path} is not a file of predictions ({error}): run `torchbayes evaluate`"
            ) from error


@dataclass(frozen=True)
class Predictions(_Archive):
    """Class probabilities for a test set and, optionally, an out-of-distribution set.

    Attributes:
        probs: Averaged probabilities, (examples, classes).
        aleatoric: Expected entropy of each example.
        targets: True classes.
        ood_probs: `probs` of the out-of-distribution set, or None.
        ood_aleatoric: `aleatoric` of the out-of-distribution set, or None.
        draws: Number of weight draws that were averaged.
        positions: Number of positions, such as pixels, that an example has. If there are several, the
            examples above are positions, or a part of them, and the pictures of inputs are not theirs.
    """

    probs: Tensor
    aleatoric: Tensor
    targets: Tensor
    ood_probs: Tensor | None = None
    ood_aleatoric: Tensor | None = None
    draws: int = 1
    positions: int = 1

    @classmethod
    def of(
        cls,
        test: ClassPredictive,
        targets: Tensor,
        ood: ClassPredictive | None = None,
        ignore_index: int | None = None,
    ) -> Predictions:
        """Collect the predictions of two predictives, maps by position."""
        positions = test.aleatoric.numel() // len(test)
        test, targets = position_rows(test, targets, ignore_index)
        if ood is not None:
            ood = position_rows(ood, torch.zeros_like(ood.aleatoric))[0]
        return cls(
            test.probs.cpu(),
            test.aleatoric.cpu(),
            targets.cpu(),
            None if ood is None else ood.probs.cpu(),
            None if ood is None else ood.aleatoric.cpu(),
            test.draws,
            positions,
        )

    @property
    def test(self) -> ClassPredictive:
        """Predictive of the test set."""
        return ClassPredictive(self.probs, self.aleatoric, self.draws)

    @property
    def ood(self) -> ClassPredictive | None:
        """Predictive of the out-of-distribution set."""
        if self.ood_probs is None or self.ood_aleatoric is None:
            return None
        return ClassPredictive(self.ood_probs, self.ood_aleatoric, self.draws)

    def scores(self) -> dict[str, float]:
        """Compute every score of `torchbayes.metrics.classification_scores` that the predictions allow."""
        ood = self.ood
        return metrics.classification_scores(
            self.probs,
            self.targets,
            mutual_information=self.test.epistemic,
            ood_probs=self.ood_probs,
            ood_mutual_information=None if ood is None else ood.epistemic,
        )


@dataclass(frozen=True)
class RegressionPredictions(_Archive):
    """Predicted values for a test set, by draw, and the uncertainty about an out-of-distribution set.

    Attributes:
        means: Mean predicted by each draw, (draws, examples, targets).
        stds: Noise predicted by each draw, (draws, examples, targets).
        targets: True values, (examples, targets).
        ood_epistemic: Standard deviation over draws of the predicted mean on the out-of-distribution
            set, or None.
    """

    means: Tensor
    stds: Tensor
    targets: Tensor
    ood_epistemic: Tensor | None = None

    @classmethod
    def of(
        cls, test: RegressionPredictive, targets: Tensor, ood: RegressionPredictive | None = None
    ) -> RegressionPredictions:
        """Collect the predictions of two predictives."""
        means = test.means.cpu()
        return cls(
            means,
            test.stds.cpu(),
            like_predictions(targets.cpu(), means.shape[1:]),
            None if ood is None else ood.epistemic.cpu(),
        )

    def scores(self) -> dict[str, float]:
        """Compute `torchbayes.metrics.regression_scores`, and detection by epistemic uncertainty."""
        table = metrics.regression_scores(self.means, self.stds, self.targets)
        if self.ood_epistemic is not None:
            known = self.means.std(0, correction=0)
            # The uncertainty of several targets is the norm of theirs.
            pair = [part.flatten(1).norm(dim=1) for part in (known, self.ood_epistemic)]
            table["auroc_ood"] = metrics.auroc(*pair)
        return table
