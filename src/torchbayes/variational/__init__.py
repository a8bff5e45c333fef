"""Modules around the user's network that draw, perturb or generate its weights."""

from torchbayes.variational.dropout import DropoutPosterior, MCDropout
from torchbayes.variational.estimators import (
    Estimator,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.hypernet import Hypernet
from torchbayes.variational.hypernet_sgd import HypernetSGD
from torchbayes.variational.meanfield import MeanField
from torchbayes.variational.objective import annealed_weight, blundell_weight, uniform_weight
from torchbayes.variational.prune import SignalToNoise, prune, signal_to_noise

__all__ = [
    "DropoutPosterior",
    "Estimator",
    "Hypernet",
    "HypernetSGD",
    "MCDropout",
    "MeanField",
    "SignalToNoise",
    "annealed_weight",
    "blundell_weight",
    "flipout",
    "local_reparameterisation",
    "prune",
    "shared_draw",
    "signal_to_noise",
    "uniform_weight",
]
