"""Whether a posterior is right: against exact answers, against NUTS, and chain against chain."""

from torchbayes.checks.nuts import compare_to_nuts
from torchbayes.checks.verify import verify

__all__ = ["compare_to_nuts", "verify"]
