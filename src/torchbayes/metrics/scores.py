"""The tables of scores in results.json, under its keys."""

from torch import Tensor

from torchbayes.metrics import _inputs
from torchbayes.metrics.calibration import binned, ece, largest_gap, mean_gap
from torchbayes.metrics.classification import accuracy, brier, confidence, correct, entropy, nll
from torchbayes.metrics.detection import auroc, fpr95
from torchbayes.metrics.regression import (
    gaussian_mixture_crps,
    gaussian_mixture_nll,
    gaussian_mixture_quantile,
    interval_coverage,
    interval_width,
    rmse,
)
from torchbayes.metrics.selective import aurc


def classification_scores(
    probs: Tensor,
    targets: Tensor,
    *,
    mutual_information: Tensor | None = None,
    ood_probs: Tensor | None = None,
    ood_mutual_information: Tensor | None = None,
) -> dict[str, float]:
    """Compute all scores of a classifier.

    Calibration errors use 15 bins. `ood_probs` adds the detection scores: `auroc_ood` and `fpr95_ood`
    by entropy, `auroc_ood_confidence` by low maximum probability, and `auroc_ood_mutual_information`,
    which is NaN without mutual information. The AUROC of misclassification is NaN if all predictions
    are right or all are wrong.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).
        mutual_information: Epistemic uncertainty (N,) of the inputs; used beside `ood_probs`.
        ood_probs: Class probabilities (M, C) of inputs from another distribution.
        ood_mutual_information: Epistemic uncertainty (M,) of those inputs.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> foreign = torch.tensor([[0.5, 0.5]])
        >>> table = classification_scores(probs, torch.tensor([0, 1]), ood_probs=foreign)
        >>> table["accuracy"], table["auroc_misclassification"], table["auroc_ood"]
        (0.5, 1.0, 1.0)
    """
    probs, targets = _inputs.labelled(probs, targets)
    right, sure, uncertain = correct(probs, targets), confidence(probs), entropy(probs)
    curve = binned(probs, right, bins=15, equal_mass=False)
    table = {
        "accuracy": accuracy(probs, targets),
        "nll": nll(probs, targets),
        "ece": mean_gap(curve),
        "ece_equal_mass": mean_gap(binned(probs, right, bins=15, equal_mass=True)),
        "mce": largest_gap(curve),
        "brier": brier(probs, targets),
        "auroc_misclassification": auroc(-sure[right], -sure[~right]),
        "auroc_misclassification_entropy": auroc(uncertain[right], uncertain[~right]),
        "aurc": aurc(sure, right),
    }
    known = _per_example(mutual_information, "mutual_information", probs)
    if ood_probs is None:
        if ood_mutual_information is not None:
            raise ValueError(
                "ood_mutual_information is given without ood_probs, expected both: pass ood_probs"
            )
        return table
    ood_probs = _inputs.probabilities(ood_probs, "ood_probs")
    if ood_probs.shape[1] != probs.shape[1]:
        raise ValueError(
            f"ood_probs has {ood_probs.shape[1]} classes, expected the {probs.shape[1]} of probs: "
            "pass predictions of the same model"
        )
    foreign = _per_example(ood_mutual_information, "ood_mutual_information", ood_probs)
    if (known is None) != (foreign is None):
        raise ValueError(
            "only one of mutual_information and ood_mutual_information is given, expected both or "
            "neither beside ood_probs"
        )
    ood_uncertain = entropy(ood_probs)
    table["auroc_ood"] = auroc(uncertain, ood_uncertain)
    table["auroc_ood_mutual_information"] = (
        float("nan") if known is None or foreign is None else auroc(known, foreign)
    )
    table["auroc_ood_confidence"] = auroc(-sure, -confidence(ood_probs))
    table["fpr95_ood"] = fpr95(uncertain, ood_uncertain)
    return table


def probability_scores(probs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute the scores for corrupted images and recalibration: accuracy, NLL and ECE."""
    return {
        "accuracy": accuracy(probs, targets),
        "nll": nll(probs, targets),
        "ece": ece(probs, targets),
    }


def regression_scores(means: Tensor, stds: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute all scores of a regression predictive, an equal-weight mixture of Gaussians over draws.

    `rmse` is that of the mixture's mean; `coverage95` and `width95` are of the central
    interval between its 2.5 % and 97.5 % quantiles, and likewise for 50 and 90 %.

    Args:
        means: Component means (S, ...).
        stds: Component standard deviations with observation noise, broadcast to `means`.
        targets: True values (...).

    Example:
        >>> import torch
        >>> table = regression_scores(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.0, 3.0]))
        >>> table["coverage95"], round(table["width95"], 2)
        (0.5, 3.92)
    """
    density = gaussian_mixture_nll(means, stds, targets)
    table = {
        "rmse": rmse(_inputs.finite(means, "means").mean(dim=0), targets),
        "nll": density,
        "crps": gaussian_mixture_crps(means, stds, targets),
    }
    for percent in (50, 90, 95):
        lower = gaussian_mixture_quantile(means, stds, 0.5 - percent / 200)
        upper = gaussian_mixture_quantile(means, stds, 0.5 + percent / 200)
        table[f"coverage{percent}"] = interval_coverage(lower, upper, targets)
        table[f"width{percent}"] = interval_width(lower, upper)
    return table


def _per_example(values: Tensor | None, name: str, probs: Tensor) -> Tensor | None:
    """Return `values` checked to have one score for each row of `probs`."""
    if values is None:
        return None
    values = _inputs.scores(values.flatten(), name)
    if len(values) != len(probs):
        raise ValueError(
            f"{name} has {len(values)} values, expected {len(probs)}, one for each row of "
            "probabilities"
        )
    return values
