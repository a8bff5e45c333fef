"""Averages of the weights along another optimiser's path, and of networks with drawn weights."""

from torchbayes.average.drawn_networks import branching, parallelizing, widening
from torchbayes.average.freeze import freeze
from torchbayes.average.hwa import HWA
from torchbayes.average.swa import SWA
from torchbayes.average.swag import SWAG

__all__ = [
    "HWA",
    "SWA",
    "SWAG",
    "branching",
    "freeze",
    "parallelizing",
    "widening",
]
