"""Mass, friction and speed limit of the samplers with momentum, in the ATMC paper's interpretable terms."""

from __future__ import annotations

import math

from torchbayes.optim.base import check_number

__all__ = ["default_average_step", "friction_of", "mass_of", "speed_limit_of"]


def default_average_step(train_size: int) -> float:
    """√(0.05 / train_size), which makes the sampler resemble SGD with momentum and learning rate 0.05.

    The energy, and with it the curvature, is in proportion to train_size; one update of SGD with momentum
    moves by lr · gradient of the mean loss, one of a sampler by average_step² · train_size times that.
    """
    return math.sqrt(0.05 / max(train_size, 1))


def _one_of(name: str, value: float | None, other: str, raw: float | None) -> None:
    if value is not None and raw is not None:
        raise ValueError(f"{name} is {value:g} and {other} is {raw:g}: give one of the two")


def mass_of(lr: float, average_step: float | None, mass: float | None, train_size: int) -> float:
    """m, such that a weight at rest moves by h/√m = `average_step` per update."""
    _one_of("average_step", average_step, "mass", mass)
    if mass is not None:
        check_number("mass", mass, above=True)
        return mass
    step = default_average_step(train_size) if average_step is None else average_step
    check_number("average_step", step, above=True)
    return (lr / step) ** 2


def friction_of(lr: float, momentum: float | None, friction: float | None, *, exact: bool) -> float:
    """D, such that an update keeps the share `momentum` of the momentum: e^(−Dh), or 1 − Dh by Euler."""
    _one_of("momentum", momentum, "friction", friction)
    if friction is not None:
        check_number("friction", friction, above=True)
        return friction
    kept = 0.9 if momentum is None else momentum
    if not 0 < kept < 1:
        raise ValueError(
            f"momentum is {kept:g}: expected the share of it that an update keeps, between 0 and 1"
        )
    return -math.log(kept) / lr if exact else (1 - kept) / lr


def speed_limit_of(
    lr: float, mass: float, max_step: float | None, speed_limit: float | None, default: float
) -> float:
    """c, such that no update is longer than h·c = `max_step`; `default` is c·√m if neither is given."""
    _one_of("max_step", max_step, "speed_limit", speed_limit)
    if speed_limit is not None:
        check_number("speed_limit", speed_limit, above=True)
        return speed_limit
    if max_step is None:
        return default / math.sqrt(mass)
    check_number("max_step", max_step, above=True)
    average = lr / math.sqrt(mass)
    if max_step < average:
        raise ValueError(
            f"max_step is {max_step:g} but the average step is {average:g}: expected a larger one, or inf "
            "for no limit"
        )
    return max_step / lr
