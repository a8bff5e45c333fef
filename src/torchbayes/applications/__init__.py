"""Applications of posteriors: pruning, continual learning and distillation."""

from torchbayes.applications.distill import distill
from torchbayes.applications.prune import prune, signal_to_noise

__all__ = ["distill", "prune", "signal_to_noise"]
