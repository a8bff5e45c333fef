"""The temperature of a sampler that tunes itself: below 1 where there are many weights for each example.

With N(0, 1) on every weight, the posterior of a network that has far more weights than examples is nearly its
prior: the data fix some directions, in all others the weights stray as far as the prior lets them, and what
that does to the outputs adds up over all of them. Its prediction is then worse than that of one trained
network: F. Wenzel et al., How Good is the Bayes Posterior in Deep Neural Networks Really?, ICML 2020. As
there, the remedy is a *cold* posterior, p(w | data)^(1/T) with T < 1: likelihood and prior become sharper
alike, so that the mode stays where it is. It is not what Bayes' rule gives.
"""

from __future__ import annotations

__all__ = ["EXACT", "LEAST", "default_temperature"]

# Weights per example up to which a sampler is exact, and the least temperature, below which none was tried.
# SGNHT's NLL less that of MAP at T = 1 and T = 0.1, with about 12 weights per example: 500 digits +0.047 and
# -0.011, 2,000 images of CIFAR-10 +0.036 and -0.059, 4,000 of Fashion-MNIST -0.011 and -0.054. With 276
# (200 digits) it was +0.198 and +0.035, and 0.000 at T = 0.003. One seed each, other than those of the suite.
EXACT, LEAST = 4, 1e-3


def default_temperature(weights: int, train_size: int) -> float:
    """Return T = min(1, 4N/D)² for D weights and N examples, but no less than 0.001.

    Example:
        >>> from torchbayes.optim.cold import default_temperature
        >>> default_temperature(4000, train_size=1000), default_temperature(8000, train_size=1000)
        (1.0, 0.25)
    """
    return max(LEAST, min(1.0, EXACT * train_size / weights) ** 2)
