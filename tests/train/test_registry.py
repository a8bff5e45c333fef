"""A method's options stand in its class, and nowhere else."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import torchbayes as tb
from torchbayes.core.declaration import DECLARED
from torchbayes.train.registry import METHODS, find_method, method_options, values_in_use

FACTS = {"model", "train_size", "steps", "batch_size", "params", "generator"}


@pytest.mark.parametrize("name", ["vogn", "ogn", "ivon", "kfac", "noisy-kfac", "mle"])
def test_an_optimisers_options_are_its_arguments(name: str) -> None:
    own = inspect.signature(METHODS[name].algorithm).parameters
    options = method_options(METHODS[name])
    assert set(options) == set(own) - FACTS
    for option in options.values():
        assert option.default == own[option.name].default


def test_map_adds_when_the_evidence_chooses_its_prior() -> None:
    own = set(inspect.signature(tb.MAP).parameters) - FACTS
    assert set(method_options(METHODS["map"])) == own | {"evidence_every"}


def test_a_sampler_adds_when_to_keep_its_states() -> None:
    own = set(inspect.signature(tb.ATMC).parameters) - FACTS
    kept = {"burn_in", "samples", "thinning", "chains", "side_by_side", "sample_folder"}
    assert set(method_options(METHODS["atmc"])) == own | kept


def test_a_declaration_may_have_defaults_of_its_own() -> None:
    assert method_options(METHODS["swag"])["low"].default == 1.0
    assert method_options(METHODS["hwa"])["low"].default == 0.01


def test_computed_defaults_are_shown() -> None:
    values = values_in_use(METHODS["vogn"], train_size=1500)
    assert values["damping"] == 0.0  # bounded steps need none
    assert values["lr"] == 0.01
    assert "damping=0," in repr(tb.VOGN(nn.Linear(2, 1), train_size=1500))
    # With a step that is given, the paper's: 150/N.
    assert "damping=0.1," in repr(tb.VOGN(nn.Linear(2, 1), lr=1e-3, train_size=1500))
    assert values_in_use(METHODS["sgld"], train_size=400) == {}  # it measures them
    assert values_in_use(METHODS["bbb"], train_size=400) == {}


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="there is no method 'vogm': did you mean 'vogn'"):
        find_method("vogm")
    with pytest.raises(ValueError, match="has no option 'prior_precision': did you mean 'prior'"):
        tb.fit(nn.Linear(2, 1), None, "vogn", prior_precision=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgld"}, "there is already a method 'sgld'"),
        ({"family": "samples"}, "family is 'samples': expected one of 'one network'"),
        ({"target": "truth"}, "target is 'truth': expected 'posterior' or 'mean field'"),
        ({"summary": "two\nlines"}, "expected one line"),
    ],
)
def test_bad_declarations_are_named(changes: dict[str, str], message: str) -> None:
    about = {"family": "one network", "posterior": "Point", "summary": "…", "paper": "…"} | changes
    with pytest.raises(ValueError, match=message):
        tb.register(about.pop("name", "new"), **about)


def test_a_class_that_fit_cannot_train_says_what_to_derive_it_from() -> None:
    try:
        tb.register("odd", family="one network", posterior="Point", summary="…", paper="…")(dict)
        with pytest.raises(TypeError, match=r"derive it from one of .*Sampler.* torchbayes.Method"):
            find_method("odd")
    finally:
        DECLARED.pop("odd")


def test_a_method_of_ones_own() -> None:
    """`tb.Method` with the hooks of the loop, for what is none of the families."""

    class Halved(tb.Method):
        """Adam at half the rate.

        Args:
            lr: Twice the rate.
        """

        def __init__(self, model, likelihood, plan, *, lr: float = 0.02) -> None:  # type: ignore[no-untyped-def]
            super().__init__(model, likelihood, plan)
            self.set_optimizer(tb.MLE(model, lr / 2))

        def posterior(self) -> tb.Posterior:
            return self.optimizer.posterior()  # type: ignore[attr-defined]

    import torch

    data = torch.randn(40, 3), torch.arange(40) % 2
    about = {"family": "one network", "posterior": "Point", "summary": "…", "paper": "…"}
    try:
        tb.register("halved", **about)(Halved)
        assert method_options(METHODS["halved"])["lr"].meaning == "Twice the rate."
        runs = [
            tb.fit(lambda: nn.Linear(3, 2), data, method, lr=lr, epochs=2, progress=False)
            for method, lr in (("halved", 0.02), ("mle", 0.01))
        ]
        one, two = (run.posterior.mean()["weight"] for run in runs)
        assert torch.equal(one, two)
    finally:
        DECLARED.pop("halved")
