"""Search for a method's options by the negative log-likelihood of held-out data (extra `tune`: Optuna)."""

from torchbayes.tuning.search import Search, Trial, Tuning
from torchbayes.tuning.space import Space, default_space
from torchbayes.tuning.tune import tune

__all__ = ["Search", "Space", "Trial", "Tuning", "default_space", "tune"]
