"""Numbers, lists and names as text for readers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from torchbayes.report.results import MethodResult
from torchbayes.report.svg import colour, element, marker, markup

__all__ = [
    "amount", "count", "duration", "fixed", "listing", "memory", "method_list", "method_name",
    "percent", "seed_note", "significant", "swatch", "times", "whole", "wilson",
]  # fmt: skip

_SPACE = "\u202f"  # narrow and unbreakable, between a number and its unit
_NAMED = 6
_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"
)  # fmt: skip


def fixed(value: float, decimals: int) -> str:
    """Format a number with a fixed number of decimals and a real minus sign.

    Example:
        >>> fixed(0.07656, 4), fixed(-0.0000001, 2)
        ('0.0766', '0.00')
    """
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def significant(value: float) -> str:
    """Format a number with two or three significant digits.

    Example:
        >>> significant(0.07656), significant(1.2345), significant(123.4)
        ('0.077', '1.23', '123')
    """
    if abs(value) >= 100:
        return whole(value)
    return fixed(value, 2) if abs(value) >= 1 else fixed(value, 3)


def percent(value: float, decimals: int = 1) -> str:
    """Format a share of one as a percentage.

    Example:
        >>> percent(0.97556).replace("\u202f", " ")
        '97.6 %'
    """
    return f"{fixed(100 * value, decimals)}{_SPACE}%"


def whole(value: float) -> str:
    """Format a whole number with its thousands separated.

    Example:
        >>> whole(55210.0).replace("\u202f", " ")
        '55 210'
    """
    return f"{value:,.0f}".replace(",", _SPACE)


def duration(seconds: float) -> str:
    """Format a time in suitable units.

    Example:
        >>> [duration(s).replace("\u202f", " ") for s in (0.31, 6.33, 125, 7290)]
        ['0.31 s', '6.3 s', '2 min 5 s', '2 h 1 min']
    """
    if seconds < 1:
        return f"{seconds:.2f}{_SPACE}s"
    if seconds < 60:
        return f"{seconds:.1f}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min {rest}{_SPACE}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h {minutes}{_SPACE}min"


def memory(size: float) -> str:
    """Format a number of bytes in suitable units.

    Example:
        >>> [memory(size).replace("\u202f", " ") for size in (512, 3.1e6, 1.5e9)]
        ['1 kB', '3.1 MB', '1.5 GB']
    """
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.1f}{_SPACE}{unit}"
    return f"{size / 1e3:.0f}{_SPACE}kB"


def amount(value: float) -> str:
    """Format a large whole number with three significant digits.

    Example:
        >>> [amount(value).replace("\u202f", " ") for value in (850, 55_050, 2_202_000)]
        ['850', '55.0 k', '2.20 M']
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            share = value / size
            decimals = 2 if share < 10 else 1 if share < 100 else 0
            return f"{share:.{decimals}f}{_SPACE}{unit}"
    return whole(value)


def times(factor: float) -> str:
    """Format a ratio.

    Example:
        >>> times(0.0234), times(1.06), times(238.6)
        ('0.023×', '1.1×', '239×')
    """
    if factor < 0.95:
        return f"{factor:.2g}×"
    return f"{fixed(factor, 1) if factor < 10 else whole(factor)}×"


def count(number: int, noun: str) -> str:
    """Format a count, in words up to twelve.

    Example:
        >>> count(3, "method"), count(1, "method"), count(20, "method").replace("\u202f", " ")
        ('three methods', 'one method', '20 methods')
    """
    amount = _WORDS[number] if 0 <= number < len(_WORDS) else whole(number)
    return f"{amount} {noun}" if number == 1 else f"{amount} {noun}s"


def listing(items: Sequence[str]) -> Markup:
    """Join items into a list as in a sentence; plain strings are escaped.

    Example:
        >>> listing(["map", "mle", "<b>"])
        Markup('map, mle and &lt;b&gt;')
    """
    if len(items) < 2:
        return Markup("").join(items)
    return Markup("{} and {}").format(Markup(", ").join(items[:-1]), items[-1])


def method_name(method: MethodResult) -> Markup:
    """Return a method's name in its colour."""
    return Markup('<b class="method {}">{}</b>').format(colour(method.index), method.name)


def method_list(methods: Sequence[MethodResult]) -> Markup:
    """List methods as in a sentence, or the first of many."""
    names = [method_name(method) for method in methods]
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], Markup(count(len(names) - _NAMED + 1, "other"))]
    return listing(names)


def swatch(method: MethodResult) -> Markup:
    """Draw a short piece of a method's line, for legends."""
    line = element("path", d="M1,7H29", class_=f"line {colour(method.index)}")
    shape = marker(method.index, 15, 7)
    return markup(
        element("svg", line, shape, viewBox="0 0 30 14", class_="swatch", aria_hidden="true")
    )


def seed_note(method: MethodResult) -> str:
    """Name the seed of the predictions shown; empty if the method has a single run."""
    return f" (seed {method.seed})" if len(method.runs) > 1 and method.seed is not None else ""


def wilson(share: float, examples: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, which, unlike the normal one, does not vanish at 0 and 1.

    Example:
        >>> [round(end, 3) for end in wilson(1.0, 100)]
        [0.963, 1.0]
    """
    z = 1.959963984540054
    middle = share + z**2 / (2 * examples)
    half = z * math.sqrt(share * (1 - share) / examples + (z / (2 * examples)) ** 2)
    scale = 1 + z**2 / examples
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
