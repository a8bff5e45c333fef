"""The registry: every method that `fit`, the command line and the conformance tests know.

To add one, write a file with a `Method` subclass under `@register` and import it below; CONTRIBUTING.md
has the guide. Nothing else has to change.
"""

from torchbayes.methods.atmc import AtmcMethod
from torchbayes.methods.base import (
    METHODS,
    Method,
    Option,
    Plan,
    find_method,
    method_options,
    register,
)
from torchbayes.methods.bbb import BbbMethod
from torchbayes.methods.dropout import DropoutMethod
from torchbayes.methods.ensemble import EnsembleMethod
from torchbayes.methods.hwa import HwaMethod
from torchbayes.methods.hypernet import HypernetMethod
from torchbayes.methods.ivon import IvonMethod
from torchbayes.methods.kfac import KfacMethod
from torchbayes.methods.map import MapMethod, MleMethod
from torchbayes.methods.noisy_kfac import NoisyKfacMethod
from torchbayes.methods.ogn import OgnMethod
from torchbayes.methods.psgld import PsgldMethod
from torchbayes.methods.sghmc import SghmcMethod
from torchbayes.methods.sgld import SgldMethod
from torchbayes.methods.sgnht import SgnhtMethod
from torchbayes.methods.swa import SwaMethod
from torchbayes.methods.swag import SwagMethod
from torchbayes.methods.vogn import VognMethod

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
