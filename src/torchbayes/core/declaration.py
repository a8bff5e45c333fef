"""The list of methods: the name of each, and the class that defines its algorithm and options.

An algorithm's file declares its method, so that a new one needs no other change. How `fit` trains a class
follows from what owns the weights in training, that is from its base: see `torchbayes.train.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["DECLARED", "FAMILIES", "Declaration", "register"]

FAMILIES = ("one network", "ensemble, masks, generator", "a Gaussian", "a chain's samples")
"""The possible representations of the posterior."""

_TARGETS = ("posterior", "mean field")
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Declaration:
    """What the library knows about a method besides its class.

    Attributes:
        name: Name for users.
        algorithm: The class with its arguments, their defaults and their documentation.
        family: Representation of the posterior, one of `FAMILIES`.
        posterior_kind: Class name of its posterior.
        target: What `verify` compares it with: `"posterior"`, `"mean field"` (the nearest Gaussian with
            independent weights), or None if it approximates neither.
        summary: One-line description.
        paper: Source of the method.
        defaults: Defaults that differ from those of the classes that the method is composed of.
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
    name: str, *, family: str, posterior: str, summary: str, paper: str, target: str | None = None,
    **defaults: Any,
) -> Callable[[_Class], _Class]:  # fmt: skip
    """Declare a class as a method, which enrols it in `fit`, the command line, report, docs and tests.

    Args:
        name: Name for users, such as `"sgld"`.
        family: Representation of the posterior, one of `torchbayes.core.declaration.FAMILIES`.
        posterior: Class name of its posterior, such as `"Samples"`.
        summary: One-line description.
        paper: Source of the method.
        target: What `verify` compares it with: `"posterior"`, `"mean field"`, or None for nothing.
        **defaults: Defaults that differ from those of the classes that the method is composed of.

    Returns:
        A decorator for a subclass of `Sampler`, of another base of the library, or of `Method`.

    Example:
        >>> import torchbayes as tb
        >>> tb.METHODS["sgld"].algorithm is tb.SGLD
        True
    """
    if name in DECLARED:
        raise ValueError(f"there is already a method {name!r}: choose another name")
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
