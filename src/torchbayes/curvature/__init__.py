"""Curvature from one backward pass: exact per-example squared gradients and Kronecker factors."""

from torchbayes.curvature.capture import Capture
from torchbayes.curvature.tape import Tape

__all__ = ["Capture", "Tape"]
