"""Curvature from one backward pass: exact per-example squared gradients and Kronecker factors."""

from torchbayes.curvature.capture import Capture

__all__ = ["Capture"]
