"""Likelihoods: how a network's outputs define a distribution of the targets, for the loss and predictions.

Every likelihood's `loss` is the *mean* negative log-likelihood of a batch, per example, as the methods
expect. The terms of several outputs per example are summed, not averaged, because the likelihood of an
example is their product. An example's weight, and the weight of its class, multiply its negative
log-likelihood: the likelihood is raised to that power (tempered). The sum is divided by the number of
examples, not by the sum of the weights: a weight of 1 changes nothing, and `train_size` keeps its meaning.
"""

from torchbayes.likelihood.base import Likelihood
from torchbayes.likelihood.bernoulli import Bernoulli
from torchbayes.likelihood.categorical import Categorical
from torchbayes.likelihood.choose import as_likelihood, inferred_likelihood
from torchbayes.likelihood.noise import GaussianNoise, StudentT
from torchbayes.likelihood.observation import Observation
from torchbayes.likelihood.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "GaussianNoise",
    "Likelihood",
    "Observation",
    "Poisson",
    "StudentT",
    "as_likelihood",
    "inferred_likelihood",
]
