"""What recipes and the command line spell otherwise than Python."""

from __future__ import annotations

from typing import Any

import pytest

import torchbayes as tb
from torchbayes.experiments.options import check_spelling, option_names, translated
from torchbayes.train.registry import METHODS


def test_names_and_tables_become_priors() -> None:
    assert translated({"prior": 4.0}, 1) == {"prior": 4.0}
    made = translated({"prior": {"mixture": {"pi": 0.25, "std1": 2.0}}}, 1)["prior"]
    assert isinstance(made, tb.ScaleMixturePrior)
    assert (made.pi, made.std1) == (0.25, 2.0)
    assert isinstance(translated({"prior": "resnetpp"}, 1)["prior"], tb.prior.PriorByName)


def test_functions_pairs_and_epochs() -> None:
    given = {"estimator": "flipout", "latent": "half-normal", "betas": [0.9, 0.5], "lr": 0.1}
    found = translated({**given, "temperature_epochs": 1.5}, steps_per_epoch=11)
    assert found["estimator"] is tb.flipout
    assert found["latent"] is tb.latents.half_normal
    assert found["betas"] == (0.9, 0.5)
    assert found["temperature_steps"] == 16  # 16.5, rounded to even
    assert "temperature_epochs" in option_names(METHODS["vogn"])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "bbb",
            {"prior": "laplace"},
            "prior is 'laplace': expected gaussian or mixture or resnetpp",
        ),
        ("bbb", {"prior": {"mixture": {"sigma": 1.0}}}, "unexpected keyword argument 'sigma'"),
        ("bbb", {"estimator": "flip"}, "estimator is 'flip': expected shared_draw or"),
        ("hypernet", {"latent": "gauss"}, "latent is 'gauss': expected normal or"),
        ("vogn", {"beta2": 0.1}, "method 'vogn' has no option 'beta2': did you mean 'betas'"),
        ("sgld", {"temperature_epochs": 1.0}, "method 'sgld' has no option 'temperature_epochs'"),
    ],
)
def test_what_stands_for_nothing_is_named(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_spelling(METHODS[method], options)
