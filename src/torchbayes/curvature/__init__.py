"""Curvature from one backward pass: exact per-example squared gradients and Kronecker factors."""

from torchbayes.curvature.capture import Capture
from torchbayes.curvature.loss import check_mean_loss

__all__ = ["Capture", "check_mean_loss"]
