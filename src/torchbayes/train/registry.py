"""Every method there is: those declared in this library and those of installed packages.

A declared class becomes a `Method` by its base, which says who owns the weights while it trains: an
optimiser, a sampler, a wrapper or an observer. A package adds methods through the entry-point group
`torchbayes.methods`; CONTRIBUTING.md shows how.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partialmethod
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from torch import nn

from torchbayes.average import HWA
from torchbayes.average.averager import Averager
from torchbayes.core.declaration import DECLARED, Declaration
from torchbayes.optim.base import ModelOptimizer
from torchbayes.optim.map import MAP, MLE
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Wrapper
from torchbayes.train import ensemble as _declares_a_method  # noqa: F401
from torchbayes.train import laplace as _declares_another  # noqa: F401
from torchbayes.train.averaging import HwaMethod, SwaMethod
from torchbayes.train.chains import SamplerMethod
from torchbayes.train.method import Method, arguments_of
from torchbayes.train.optimizer import MapMethod, OptimizerMethod
from torchbayes.train.wrapper import HypernetMethod, LastLayerMethod, MeanFieldMethod, WrapperMethod
from torchbayes.variational import VBLL, Hypernet, MeanField

__all__ = ["METHODS", "Option", "check_options", "find_method", "method_options", "values_in_use"]

_LOG = logging.getLogger("torchbayes")

# Who owns the weights while an algorithm trains, and so how it is trained: by the nearest of its bases.
_DRIVERS: dict[type, type[Method]] = {
    ModelOptimizer: OptimizerMethod,
    MAP: MapMethod,
    MLE: OptimizerMethod,
    Sampler: SamplerMethod,
    Averager: SwaMethod,
    HWA: HwaMethod,
    Wrapper: WrapperMethod,
    MeanField: MeanFieldMethod,
    Hypernet: HypernetMethod,
    VBLL: LastLayerMethod,
}


class _Methods(Mapping[str, type[Method]]):
    """The methods by name, in alphabetical order; installed packages are asked when one is first needed."""

    def __init__(self) -> None:
        self._made: dict[str, type[Method]] = {}
        self._complete = False

    def _load(self) -> None:
        if self._complete:
            return
        self._complete = True
        for entry in entry_points(group="torchbayes.methods"):
            try:
                entry.load()
            except Exception as error:  # another package's mistake must not take this one down
                _LOG.warning(
                    "the method %r of an installed package could not be loaded and is left out: %s",
                    entry.name, error,
                )  # fmt: skip

    def __getitem__(self, name: str) -> type[Method]:
        self._load()
        declared = DECLARED[name]
        if name not in self._made:
            self._made[name] = _method(declared)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(DECLARED))

    def __len__(self) -> int:
        self._load()
        return len(DECLARED)


METHODS: Mapping[str, type[Method]] = _Methods()


def _method(declared: Declaration) -> type[Method]:
    """Make the method of a declaration."""
    algorithm = declared.algorithm
    base = algorithm if issubclass(algorithm, Method) else _driver(declared)
    about: dict[str, Any] = {
        "name": declared.name, "summary": declared.summary, "paper": declared.paper,
        "family": declared.family, "posterior_kind": declared.posterior_kind,
        "target": declared.target, "algorithm": algorithm, "defaults": dict(declared.defaults),
        "__module__": algorithm.__module__, "__doc__": algorithm.__doc__,
    }  # fmt: skip
    if declared.defaults:
        about["__init__"] = partialmethod(base.__init__, **declared.defaults)
    made: type[Method] = type(f"{algorithm.__name__}Method", (base,), about)
    return made


def _driver(declared: Declaration) -> type[Method]:
    for base in declared.algorithm.__mro__:
        if base in _DRIVERS:
            return _DRIVERS[base]
    bases = ", ".join(base.__name__ for base in _DRIVERS)
    raise TypeError(
        f"method {declared.name!r} is a {declared.algorithm.__name__}, which fit does not know how to train: "
        f"derive it from one of {bases}, or from torchbayes.Method"
    )


def find_method(name: str) -> type[Method]:
    """Return the method called `name`.

    Raises:
        ValueError: If there is none; the message suggests the nearest name.
    """
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(METHODS)}"
    raise ValueError(f"there is no method {name!r}: {hint}")


@dataclass(frozen=True)
class Option:
    """One option of a method: its name, type, default and meaning."""

    name: str
    type: Any
    default: Any
    meaning: str


def method_options(method: type[Method]) -> dict[str, Option]:
    """Return the options of a method: the arguments of the classes that it is made of, and its own.

    Example:
        >>> from torchbayes.train.registry import find_method, method_options
        >>> method_options(find_method("swag"))["rank"].default
        20
    """
    own = [cls for cls in method.__mro__ if inspect.isfunction(vars(cls).get("__init__"))]
    own = [cls for cls in own if issubclass(cls, Method)]
    algorithm = [] if issubclass(method.algorithm, Method) else [method.algorithm]
    found: dict[str, Option] = {}
    for source in [*method.uses, *algorithm, *own]:
        hints = get_type_hints(source.__init__)  # type: ignore[misc]
        for name, parameter in arguments_of(source).items():
            if name in found and source not in own:
                continue
            default = method.defaults.get(name, parameter.default)
            found[name] = Option(name, hints.get(name, Any), default, _meaning(source, name))
    return found


def _meaning(source: type, option: str) -> str:
    """What the class, or the nearest of its bases that says so, documents about an argument."""
    for cls in source.__mro__:
        found: list[str] = []
        for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
            text = line.strip()
            if line.startswith(f"    {option}:"):
                found.append(text.partition(":")[2].strip())
            elif found and line.startswith(" " * 8):
                found.append(text)
            elif found:
                break
        if found:
            return " ".join(found)
    return ""


def values_in_use(method: type[Method], train_size: int) -> dict[str, Any]:
    """Return the values that an optimiser computes for options that are None by default.

    Args:
        method: The method.
        train_size: The number of training examples that they are computed for.

    Example:
        >>> from torchbayes.train.registry import find_method, values_in_use
        >>> values_in_use(find_method("vogn"), train_size=1000)["lr"]
        0.01
    """
    if not issubclass(method.algorithm, ModelOptimizer):
        return {}
    make: Callable[..., ModelOptimizer] = method.algorithm
    knows_size = "train_size" in inspect.signature(make).parameters
    optimizer = make(nn.Linear(1, 1), **({"train_size": train_size} if knows_size else {}))
    if isinstance(optimizer, Sampler) and optimizer.warmup:
        return {}  # it measures them
    group = optimizer.param_groups[0]
    options = method_options(method).values()
    computed = {o.name: group[o.name] for o in options if o.default is None and o.name in group}
    return {name: value for name, value in computed.items() if value is not None}


def check_options(method: type[Method], options: Iterable[str]) -> None:
    """Raise a `ValueError` that names the first option that `method` does not have."""
    known = method_options(method)
    for name in options:
        if name not in known:
            longer = [own for own in known if name.startswith(f"{own}_")]  # such as prior_precision
            near = longer or difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"method {method.name!r} has no option {name!r}: {hint}")
