"""Modules around the user's network that draw, perturb or generate its weights."""

from torchbayes.variational.estimators import (
    Estimator,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.exact_last_layer import ExactLastLayer
from torchbayes.variational.hypernet import Hypernet
from torchbayes.variational.hypernet_sgd import HypernetSGD
from torchbayes.variational.last_layer import VBLL
from torchbayes.variational.mc_dropout import MCDropout
from torchbayes.variational.meanfield import MeanField
from torchbayes.variational.objective import annealed_weight, blundell_weight, uniform_weight

__all__ = [
    "VBLL",
    "Estimator",
    "ExactLastLayer",
    "Hypernet",
    "HypernetSGD",
    "MCDropout",
    "MeanField",
    "annealed_weight",
    "blundell_weight",
    "flipout",
    "local_reparameterisation",
    "shared_draw",
    "uniform_weight",
]
