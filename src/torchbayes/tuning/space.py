"""What a search may try: ranges of numbers and lists of choices, by the option's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchbayes.train.method import Method
from torchbayes.train.registry import method_options, values_in_use

__all__ = ["Space", "check_space", "default_space", "on_log_scale"]

Space = Mapping[str, Sequence[Any]]
"""A pair (lowest, highest) of numbers, or a list of choices, for each option."""

_RATE = (1 / 30, 10.0)
_RATES = (1e-3, 1.0)  # where the default is a rule, and a rate that is given means the paper's step
_PRECISIONS = (0.01, 100.0)


def default_space(method: type[Method], train_size: int) -> dict[str, tuple[float, float]]:
    """Return what is searched if nothing is said: the rate around its default, and the prior's precision.

    Example:
        >>> from torchbayes.train.registry import find_method
        >>> from torchbayes.tuning import default_space
        >>> sorted(default_space(find_method("map"), train_size=1000))
        ['lr', 'prior']
    """
    options = method_options(method)
    space: dict[str, tuple[float, float]] = {}
    if "lr" in options:
        usual = options["lr"].default
        if usual is None:
            rates = (getattr(used, "usual_rate", None) for used in method.uses)
            usual = next((rate for rate in rates if rate is not None), None)
        if usual is not None:
            space["lr"] = (_RATE[0] * usual, _RATE[1] * usual)
        elif "lr" in values_in_use(method, train_size):
            space["lr"] = _RATES
    if "prior" in options:
        space["prior"] = _PRECISIONS
    if not space:
        raise ValueError(
            f"method {method.name!r} has neither lr nor prior to search for: say what to try, such as "
            "space={'members': [3, 5, 10]}"
        )
    return space


def check_space(space: Space) -> None:
    """Raise a `ValueError` for the first range or list that cannot be searched."""
    for name, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < 2:
            raise ValueError(
                f"space has {values!r} for {name!r}: expected a pair (lowest, highest) or a list of choices"
            )
        if is_range(values) and not values[0] < values[1]:
            raise ValueError(
                f"space has {tuple(values)!r} for {name!r}: expected the lower number first"
            )
        for value in values:
            if not isinstance(value, (bool, int, float, str)):
                raise ValueError(
                    f"space has {value!r} for {name!r}: expected numbers, words or True and False"
                )


def is_range(values: Sequence[Any]) -> bool:
    """Whether values are a pair of numbers in a tuple; a list holds choices."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    return isinstance(values, tuple) and len(values) == 2 and numbers


def on_log_scale(low: float, high: float) -> bool:
    """Whether a range is searched by its logarithm: if it spans a factor of ten or more."""
    return low > 0 and high >= 10 * low
