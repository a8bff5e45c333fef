"""Sections of the page and the templates that render them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from torchbayes.report.svg import colour
from torchbayes.report.wording import method_name, swatch

__all__ = ["Section", "glossary", "read_asset", "render"]


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading.

    Attributes:
        id: Anchor.
        menu: Name in the menu.
        title: Heading.
        body: Content below the heading.
        folded: Whether the reader has to open it.
    """

    id: str
    menu: str
    title: str
    body: Markup
    folded: bool = False


def read_asset(name: str) -> str:
    """Read a file of the templates folder, even from a zipped package."""
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def glossary() -> dict[str, dict[str, str]]:
    """Return the explanations of the scores, by key, and of the terms on the page."""
    explained: dict[str, dict[str, str]] = json.loads(read_asset("glossary.json"))
    return explained


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(method_name=method_name, swatch=swatch, colour=colour)
    return environment


def render(template: str, **values: Any) -> Markup:
    """Render a template; plain strings in `values` are escaped."""
    return Markup(_environment().get_template(template).render(**values))
