"""Scores of predictions: pure functions of tensors, independent of how a prediction was made.

Classification takes averaged probabilities `probs` (N, C) and integer labels `targets` (N,), or maps
(N, C, …) and (N, …), each of whose positions counts as an example; `rows` leaves out ignored ones;
detection and selective prediction take one score per example; regression takes the means and
standard deviations of an equal-weight mixture of Gaussians, one component per posterior draw, along
dimension 0.

Every score is computed on the CPU in float64, whatever the dtype and device of its inputs, so that
a set of predictions gets the same figure on every machine; scalars are returned as `float`. An
undefined value, such as the AUROC of misclassification of a model without errors, is NaN without a
warning. Bad input raises a `ValueError` or `TypeError` of one sentence.

Accuracy and RMSE come from torchmetrics. Its calibration error is not used because it puts a
confidence of exactly 1 into a separate bin; its ROC family because it passes scores outside [0, 1]
through a sigmoid, which makes large scores equal, and returns 0 with a warning where the area is
undefined; its top-k accuracy because it breaks ties arbitrarily.
"""

from torchbayes.metrics._inputs import rows
from torchbayes.metrics.binary import binary_scores
from torchbayes.metrics.calibration import ReliabilityCurve, ece, mce, reliability_curve
from torchbayes.metrics.classification import accuracy, brier, nll, top_k_accuracy
from torchbayes.metrics.detection import (
    RocCurve,
    aupr,
    auroc,
    auroc_misclassification,
    fpr95,
    roc_curve,
)
from torchbayes.metrics.diversity import double_fault, fault_counts
from torchbayes.metrics.regression import (
    gaussian_crps,
    gaussian_mixture_crps,
    gaussian_mixture_nll,
    gaussian_mixture_quantile,
    interval_coverage,
    interval_width,
    rmse,
)
from torchbayes.metrics.scores import classification_scores, regression_scores
from torchbayes.metrics.segmentation import iou, mean_iou
from torchbayes.metrics.selective import RiskCoverage, aurc, excess_aurc, risk_coverage

__all__ = [
    "ReliabilityCurve",
    "RiskCoverage",
    "RocCurve",
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "auroc_misclassification",
    "binary_scores",
    "brier",
    "classification_scores",
    "double_fault",
    "ece",
    "excess_aurc",
    "fault_counts",
    "fpr95",
    "gaussian_crps",
    "gaussian_mixture_crps",
    "gaussian_mixture_nll",
    "gaussian_mixture_quantile",
    "interval_coverage",
    "interval_width",
    "iou",
    "mce",
    "mean_iou",
    "nll",
    "regression_scores",
    "reliability_curve",
    "risk_coverage",
    "rmse",
    "roc_curve",
    "rows",
    "top_k_accuracy",
]
