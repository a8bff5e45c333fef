"""Checks of a posterior: against exact answers, against NUTS, and between chains."""

from torchbayes.checks.nuts import compare_to_nuts
from torchbayes.checks.verify import verify

__all__ = ["compare_to_nuts", "verify"]
