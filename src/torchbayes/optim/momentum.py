"""Mass, friction and speed limit of samplers with momentum, from the ATMC paper's interpretable settings."""

from __future__ import annotations

import math

from torchbayes.optim.base import check_number

__all__ = ["friction_of", "mass_of", "speed_limit_of"]


def _given(raw_name: str, raw: float | None, name: str, value: float | None) -> float | None:
    """Return the raw quantity if it is given, which excludes its interpretable alternative."""
    if raw is not None:
        if value is not None:
            raise ValueError(f"{name} is {value:g} and {raw_name} is {raw:g}: give one of the two")
        check_number(raw_name, raw, above=True)
    return raw


def mass_of(lr: float, average_step: float | None, mass: float | None, train_size: int) -> float:
    """Return the mass m with which a weight at rest moves by h/√m = `average_step` per update.

    The default, √(0.05 / train_size), makes the sampler resemble SGD with momentum and learning rate 0.05.
    The energy, and with it the curvature, is proportional to train_size; one update of SGD with momentum
    moves by lr · gradient of the mean loss, one of a sampler by average_step² · train_size times that.
    """
    given = _given("mass", mass, "average_step", average_step)
    if given is not None:
        return given
    step = math.sqrt(0.05 / max(train_size, 1)) if average_step is None else average_step
    check_number("average_step", step, above=True)
    return (lr / step) ** 2


def friction_of(lr: float, momentum: float | None, friction: float | None, *, exact: bool) -> float:
    """Return the D with which an update keeps the share `momentum`: e^(−Dh), or by Euler's rule 1 − Dh."""
    given = _given("friction", friction, "momentum", momentum)
    if given is not None:
        return given
    kept = 0.9 if momentum is None else momentum
    if not 0 < kept < 1:
        raise ValueError(
            f"momentum is {kept:g}: expected the share of it that an update keeps, between 0 and 1"
        )
    return -math.log(kept) / lr if exact else (1 - kept) / lr


def speed_limit_of(
    lr: float, mass: float, max_step: float | None, speed_limit: float | None, default: float
) -> float:
    """Return the c with which no update exceeds h·c = `max_step`; `default` is c·√m if neither is given."""
    given = _given("speed_limit", speed_limit, "max_step", max_step)
    if given is not None:
        return given
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
