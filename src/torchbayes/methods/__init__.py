"""The registry: every method that `fit`, the command line and the conformance tests know.

To add one, write a file with a `Method` subclass under `@register` and import it below; CONTRIBUTING.md
has the guide. Nothing else has to change.
"""

from torchbayes.methods.base import (
    METHODS,
    Method,
    Option,
    Plan,
    find_method,
    method_options,
    register,
)
from torchbayes.methods.dropout import DropoutMethod
from torchbayes.methods.ensemble import EnsembleMethod
from torchbayes.methods.map import MapMethod, MleMethod

__all__ = [
    "METHODS",
    "DropoutMethod",
    "EnsembleMethod",
    "MapMethod",
    "Method",
    "MleMethod",
    "Option",
    "Plan",
    "find_method",
    "method_options",
    "register",
]
