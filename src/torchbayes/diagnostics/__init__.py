"""Whether a sampler's chains have met: R-hat and effective sample size, of predictions first of all.

Weights mislead: a network's units can be permuted without changing it, so chains that agree on every
prediction can be far apart in the weights. Needs ArviZ: `pip install torchbayes[diagnostics]`.
"""

from torchbayes.diagnostics.convergence import by_chain, ess, rhat, to_arviz
from torchbayes.diagnostics.diagnosis import (
    Diagnosis,
    Quantity,
    diagnose,
    log_posterior,
    predictions,
)

__all__ = [
    "Diagnosis",
    "Quantity",
    "by_chain",
    "diagnose",
    "ess",
    "log_posterior",
    "predictions",
    "rhat",
    "to_arviz",
]
