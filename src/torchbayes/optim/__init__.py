"""Optimisers that own the weights' distribution: one file per algorithm."""

from torchbayes.optim.atmc import ATMC
from torchbayes.optim.ivon import IVON
from torchbayes.optim.kfac import KFAC
from torchbayes.optim.map import MAP, MLE
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.optim.ogn import OGN
from torchbayes.optim.psgld import PSGLD
from torchbayes.optim.sghmc import SGHMC
from torchbayes.optim.sgld import SGLD
from torchbayes.optim.sgnht import SGNHT
from torchbayes.optim.vogn import VOGN

__all__ = [
    "ATMC",
    "IVON",
    "KFAC",
    "MAP",
    "MLE",
    "OGN",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "VOGN",
    "NoisyKFAC",
]
