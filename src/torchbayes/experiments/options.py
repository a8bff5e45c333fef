"""Translate a method's options from recipes, run folders and the command line to Python.

Text cannot hold a prior or a function, and a recipe counts in epochs. Translated here and nowhere else:

| in a recipe | in Python |
| --- | --- |
| `prior = 25.0` | the same: the precision of a Gaussian |
| `prior = "mixture"` | `ScaleMixturePrior()` |
| `prior = { mixture = { pi = 0.5 } }` | `ScaleMixturePrior(pi=0.5)` |
| `prior = "resnetpp"` | `resnetpp_prior()` |
| `estimator = "flipout"` | `torchbayes.flipout` |
| `latent = "half-normal"` | `torchbayes.latents.half_normal` |
| `betas = [0.9, 0.1]` | `(0.9, 0.1)` |
| `temperature_epochs = 2.0` | `temperature_steps`, as many updates |
| `params = "head.*"` | the same, an argument of `fit` for every method: what to train |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchbayes.posterior.latents import LATENTS
from torchbayes.prior import GaussianPrior, Prior, ScaleMixturePrior, resnetpp_prior
from torchbayes.train.method import Method
from torchbayes.train.registry import check_options, method_options
from torchbayes.variational import flipout, local_reparameterisation, shared_draw

__all__ = ["check_spelling", "option_names", "translated"]

_PRIORS: dict[str, Callable[..., Prior]] = {
    "gaussian": GaussianPrior,
    "mixture": ScaleMixturePrior,
    "resnetpp": resnetpp_prior,
}
_ESTIMATORS = {e.__name__: e for e in (shared_draw, local_reparameterisation, flipout)}
_EPOCHS, _STEPS = "_epochs", "_steps"


def option_names(method: type[Method]) -> list[str]:
    """Return the names that a recipe may use for a method's options."""
    names = [*method_options(method), "params"]
    return names + [n.removesuffix(_STEPS) + _EPOCHS for n in names if n.endswith(_STEPS)]


def check_spelling(method: type[Method], options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for the first unknown option or value."""
    known = option_names(method)
    check_options(method, [name for name in options if name not in known])
    translated(options, steps_per_epoch=1)


def translated(options: Mapping[str, Any], steps_per_epoch: int) -> dict[str, Any]:
    """Return the options as arguments in Python.

    Args:
        options: Options of a recipe.
        steps_per_epoch: Number of updates in an epoch.

    Raises:
        ValueError: For an unknown name; the message lists the known ones.

    Example:
        >>> from torchbayes.experiments.options import translated
        >>> translated({"lr": 0.1, "prior": "mixture", "temperature_epochs": 0.5}, steps_per_epoch=100)
        {'lr': 0.1, 'prior': ScaleMixturePrior(pi=0.5, std1=1.0, std2=0.0024787521766663585), \
'temperature_steps': 50}
    """
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name.endswith(_EPOCHS):
            result[name.removesuffix(_EPOCHS) + _STEPS] = round(value * steps_per_epoch)
        elif name == "prior" and isinstance(value, (str, Mapping)):
            result[name] = _prior(value)
        elif name == "latent":
            result[name] = _named("latent", value, LATENTS)
        elif name == "estimator":
            result[name] = _named("estimator", value, _ESTIMATORS)
        else:
            result[name] = tuple(value) if name == "betas" else value
    return result


def _named(option: str, name: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{option} is {name!r}: expected {' or '.join(known)}")
    return known[name]


def _prior(value: str | Mapping[str, Any]) -> Prior:
    table: Mapping[str, Any] = {value: {}} if isinstance(value, str) else value
    if len(table) != 1:
        raise ValueError(f"prior is {value!r}: expected one prior, such as mixture")
    ((name, settings),) = table.items()
    make: Callable[..., Prior] = _named("prior", name, _PRIORS)
    try:
        return make(**settings)
    except TypeError as error:
        raise ValueError(f"prior is {value!r}: {error}") from error
