"""The registry: every method that `fit`, the command line and the conformance tests know.

To add one, write a file with a `Method` subclass under `@register` and import it below; CONTRIBUTING.md
has the guide. Nothing else has to change.
"""

from torchbayes.train.method import (
    METHODS,
    Method,
    Option,
    Plan,
    find_method,
    method_options,
    register,
)
from torchbayes.train.methods.atmc import AtmcMethod
from torchbayes.train.methods.bbb import BbbMethod
from torchbayes.train.methods.dropout import DropoutMethod
from torchbayes.train.methods.ensemble import EnsembleMethod
from torchbayes.train.methods.hwa import HwaMethod
from torchbayes.train.methods.hypernet import HypernetMethod
from torchbayes.train.methods.ivon import IvonMethod
from torchbayes.train.methods.kfac import KfacMethod
from torchbayes.train.methods.map import MapMethod, MleMethod
from torchbayes.train.methods.noisy_kfac import NoisyKfacMethod
from torchbayes.train.methods.ogn import OgnMethod
from torchbayes.train.methods.psgld import PsgldMethod
from torchbayes.train.methods.sghmc import SghmcMethod
from torchbayes.train.methods.sgld import SgldMethod
from torchbayes.train.methods.sgnht import SgnhtMethod
from torchbayes.train.methods.swa import SwaMethod
from torchbayes.train.methods.swag import SwagMethod
from torchbayes.train.methods.vogn import VognMethod

__all__ = [
    "METHODS",
    "AtmcMethod",
    "BbbMethod",
    "DropoutMethod",
    "EnsembleMethod",
    "HwaMethod",
    "HypernetMethod",
    "IvonMethod",
    "KfacMethod",
    "MapMethod",
    "Method",
    "MleMethod",
    "NoisyKfacMethod",
    "OgnMethod",
    "Option",
    "Plan",
    "PsgldMethod",
    "SghmcMethod",
    "SgldMethod",
    "SgnhtMethod",
    "SwaMethod",
    "SwagMethod",
    "VognMethod",
    "find_method",
    "method_options",
    "register",
]
