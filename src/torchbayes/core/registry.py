"""The list of methods: what each is called, and the class in which its algorithm and options stand.

An algorithm's file declares its method, so that a new one needs no other place. What `fit` does with a class
follows from who owns the weights while it trains, that is from its base: see `torchbayes.train.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["DECLARED", "FAMILIES", "Declaration", "register"]

FAMILIES = (
    "one network",
    "ensemble, masks, generator",
    "a Gaussian",
    "a chain's samples",
)
"""What can stand for the posterior."""

_TARGETS = ("posterior", "mean field")
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Declaration:
    """What the library knows of a method besides its class.

    Attributes:
        name: What users call it.
        algorithm: The class with its arguments, their defaults and their documentation.
        family: What stands for the posterior, one of `FAMILIES`.
        posterior_kind: The class name of its posterior.
        target: What `verify` holds it against: `"posterior"`, `"mean field"` (the nearest Gaussian with
            independent weights), or None if it is made for neither.
        summary: One line on what it does.
        paper: Where it is from.
        defaults: Defaults that differ from those of the classes that it is made of.
    """

    name: str
    algorithm: type
    family: str
    posterior_kind: str
    target: str | None
    summary: str
    paper: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


DECLARED: dict[str, Declaration] = {}
"""The declarations so far; `torchbayes.METHODS` has all of them, those of installed packages too."""


def register(
    name: str,
    *,
    family: str,
    posterior: str,
    summary: str,
    paper: str,
    target: str | None = None,
    **defaults: Any,
) -> Callable[[_Class], _Class]:
    """Declare a class to be a method, and so enrol it in `fit`, command line, report, docs and tests.

    Args:
        name: What users call it, such as `"sgld"`.
        family: What stands for the posterior, one of `torchbayes.core.registry.FAMILIES`.
        posterior: The class name of its posterior, such as `"Samples"`.
        summary: One line on what it does.
        paper: Where it is from.
        target: What `verify` holds it against: `"posterior"`, `"mean field"`, or None for nothing.
        **defaults: Options whose default is another one than in the classes that the method is made of.

    Returns:
        A decorator for a subclass of `Sampler`, of another of the library's bases, or of `Method`.

    Example:
        >>> import torchbayes as tb
        >>> tb.METHODS["sgld"].algorithm is tb.SGLD
        True
    """
    if name in DECLARED:
        raise ValueError(f"there is a method {name!r} already: choose another name")
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}: expected one of {', '.join(map(repr, FAMILIES))}")
    if target is not None and target not in _TARGETS:
        raise ValueError(f"target is {target!r}: expected {' or '.join(map(repr, _TARGETS))}")
    if not summary or "\n" in summary:
        raise ValueError(f"summary is {summary!r}: expected one line on what {name} does")

    def declared(cls: _Class) -> _Class:
        DECLARED[name] = Declaration(name, cls, family, posterior, target, summary, paper, defaults)
        return cls

    return declared
