"""Networks that return more than one tensor: which one the likelihood takes, in every kind of method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.average import branching

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


@dataclass
class Answer:
    """What a library of the user's own returns."""

    features: Tensor
    logits: Tensor


class Several(nn.Module):
    """Returns its outputs in the form that it is told."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.body, self.head = form, nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        features = self.body(x).relu()
        scores = self.head(features)
        if self.form == "tensor":
            return scores
        if self.form == "tuple":
            return features, scores
        if self.form == "states":
            return scores, (features, features)
        if self.form == "dict":
            return {"features": features, "scores": scores}
        return Answer(features, scores)


FORMS: list[tuple[str, Any]] = [
    ("object", None),
    ("object", "logits"),
    ("states", None),
    ("tuple", 1),
    ("dict", "scores"),
    ("dict", lambda out: out["scores"]),
]


@pytest.mark.parametrize(("form", "output"), FORMS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vogn", {}),
        ("swag", {}),
        ("dropout", {}),
        ("hypernet", {}),
        ("sgld", {"chains": 2, "side_by_side": True}),
        ("ensemble", {"members": 2}),
    ],
)
def test_output_says_which_tensor_the_likelihood_takes(
    form: str, output: Any, method: str, options: dict[str, Any]
) -> None:
    """In training, validation and prediction: bit for bit what a network that returns it alone gives."""
    settings = {"epochs": 2, "progress": False, "validation": (X, Y), **options}
    expected = tb.fit(lambda: Several("tensor"), X, Y, method, **settings)
    run = tb.fit(lambda: Several(form), X, Y, method, output=output, **settings)
    assert run.history[-1]["validation_nll"] == expected.history[-1]["validation_nll"]
    p, q = (
        r.predict(X, samples=4, generator=torch.Generator().manual_seed(0)) for r in (run, expected)
    )
    assert torch.equal(p.probs, q.probs)


def test_an_output_that_is_not_clear_gets_one_sentence() -> None:
    for form, output, message in (
        ("tuple", None, "Several returns a tuple of Tensor, Tensor: .* output="),
        ("dict", None, "Several returns a dict with 'features', 'scores': .* output="),
        ("dict", "logits", "output is 'logits' but Several returns a dict"),
        ("tuple", 2, "output is 2 but Several returns a tuple"),
        ("tensor", 0, "output is 0 but Several returns a tensor: leave it out"),
        ("states", 1, "what output=1 names gives a tuple"),
        ("dict", lambda out: None, "gives a NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            tb.fit(Several(form), X, Y, output=output, progress=False)
        model = Several(form)
        with pytest.raises(TypeError, match=message):
            tb.predictive(model, tb.Point(tb.snapshot(model)), X, output=output)


def test_a_run_is_resumed_with_its_own_output(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "progress": False, "folder": tmp_path}
    tb.fit(Several("dict"), X, Y, output="scores", **settings)
    with pytest.raises(ValueError, match="output = 'scores', not 'features'"):
        tb.fit(Several("dict"), X, Y, output="features", resume=True, **settings)


def test_branches_average_the_same_tensor() -> None:
    model = Several("dict")
    q = tb.Gaussian(tb.snapshot(model), {"head.weight": torch.full((2, 6), 0.5)})
    draws = list(q.draws(3, torch.Generator().manual_seed(0)))
    network = branching(model, q, 3, output="scores", generator=torch.Generator().manual_seed(0))
    each = [torch.func.functional_call(model, draw, X)["scores"] for draw in draws]
    torch.testing.assert_close(network(X), torch.stack(each).mean(0))


def test_estimators_take_models_with_such_outputs() -> None:
    x, y = X.numpy(), Y.numpy()
    for form, output in (("object", None), ("tuple", 1)):
        net = tb.BayesianClassifier(
            Several(form), "map", lr=0.01, epochs=60, random_state=0, output=output
        )
        assert net.fit(x, y).score(x, y) > 0.9
