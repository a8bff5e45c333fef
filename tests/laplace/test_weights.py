"""Weights of examples, classes and labels: an example of weight 2 counts as two, one of weight 0 as none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb

STRUCTURES = ["diagonal", "kronecker", "full"]
torch.manual_seed(0)
X = torch.randn(12, 2, 4, 4, dtype=torch.float64)
TIMES = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1, 1, 2, 1])
AGAIN = torch.repeat_interleave(torch.arange(12), TIMES)
CLASSES = torch.arange(12) % 3


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, outputs)
        ).double()  # fmt: skip


def targets(likelihood: tb.Likelihood) -> Tensor:
    if isinstance(likelihood, tb.Categorical):
        return CLASSES
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2, (12, 3), generator=generator).double()


def laplace(likelihood: tb.Likelihood, data: Any, structure: str, **options: Any) -> tb.Laplace:
    options = {"batch_size": 5, "check": False, **options}
    return tb.Laplace(network(3), data, likelihood, structure=structure, **options)


def assert_same(one: tb.Laplace, two: tb.Laplace) -> None:
    torch.testing.assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood())
    draws = [la.posterior().std() for la in (one, two) if hasattr(la.posterior(), "std")]
    if draws:
        for name in draws[0]:
            torch.testing.assert_close(draws[0][name], draws[1][name])
    first, second = (la._structure.solve(la._precision, torch.tensor(1.0)) for la in (one, two))
    for left, right in zip(vars(first).values(), vars(second).values(), strict=True):
        if isinstance(left, Tensor):
            torch.testing.assert_close(left @ left.t(), right @ right.t())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "likelihood",
    [tb.Categorical(), tb.Bernoulli(), tb.Poisson(), tb.GaussianNoise(0.5)],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_a_weight_is_a_number_of_copies(likelihood: tb.Likelihood, structure: str) -> None:
    y = targets(likelihood)
    weighted = laplace(likelihood, (X, y, TIMES.double()), structure)
    assert_same(weighted, laplace(likelihood, (X[AGAIN], y[AGAIN]), structure))
    loader = DataLoader(TensorDataset(X, y, TIMES.double()), 4)
    assert_same(weighted, laplace(likelihood, loader, structure))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_classes_that_weigh_or_are_ignored(structure: str, curvature: str) -> None:
    often = torch.tensor([1, 3, 2])
    again = torch.repeat_interleave(torch.arange(12), often[CLASSES])
    plain = tb.Categorical()
    one = laplace(tb.Categorical(class_weight=often), (X, CLASSES), structure, curvature=curvature)
    two = laplace(plain, (X[again], CLASSES[again]), structure, curvature=curvature)
    assert_same(one, two)
    partly, known = CLASSES.clone(), torch.arange(12) % 4 != 0
    partly[~known] = 255
    one = laplace(tb.Categorical(ignore_index=255), (X, partly), structure, curvature=curvature)
    assert_same(one, laplace(plain, (X[known], CLASSES[known]), structure, curvature=curvature))


def brute_force(net: nn.Module, likelihood: tb.Likelihood, y: Tensor) -> Tensor:
    """Σ Jᵀ H J with autograd's Jacobians, and Hessians of the loss in the outputs."""
    layer, features = net[-1], net[:-1](X).detach()
    assert isinstance(layer, nn.Linear)
    weights = {"weight": layer.weight.detach(), "bias": layer.bias.detach()}
    total = torch.zeros(84, 84, dtype=torch.float64)
    for x, target in zip(features, y, strict=True):

        def outputs(w: dict[str, Tensor], x: Tensor = x) -> Tensor:
            return torch.func.functional_call(layer, w, (x,))

        rows = torch.func.jacrev(outputs)(weights)
        jacobian = torch.cat([rows["weight"].flatten(1), rows["bias"]], 1)
        hessian = torch.autograd.functional.hessian(
            lambda out, t=target: likelihood.loss(out.unsqueeze(0), t.unsqueeze(0)),
            outputs(weights),
        )
        total += jacobian.t() @ hessian @ jacobian
    return total


@pytest.mark.parametrize(
    "likelihood",
    [
        tb.Bernoulli(), tb.Bernoulli(positive_weight=[2.0, 0.5, 3.0]), tb.Poisson(),
        tb.Categorical(class_weight=[0.5, 2.0, 1.0]),
    ],
    ids=["bernoulli", "positive weight", "poisson", "class weight"],
)  # fmt: skip
def test_roots_against_autograd_s_hessians(likelihood: tb.Likelihood) -> None:
    net, y = network(3), targets(likelihood)
    likelihood = likelihood.double()
    la = tb.Laplace(net, (X, y), likelihood, structure="full", subset="3", check=False)
    assert la.curvature == "ggn"
    truth = brute_force(net, likelihood, y)
    torch.testing.assert_close(la._structure.sums["matrix"], truth)


def test_drawn_labels_have_the_same_second_moment() -> None:
    y = targets(tb.Bernoulli())
    options = {"subset": "3.bias", "check": False, "structure": "full"}
    exact = tb.Laplace(network(3), (X, y), tb.Bernoulli(), **options)  # type: ignore[arg-type]
    drawn = tb.Laplace(
        network(3), (X, y), tb.Bernoulli(), curvature="sampled", samples=4000, **options
    )  # type: ignore[arg-type]
    # Twelve sums of 4,000 squares with a relative deviation of at most a few: 3 % in all.
    one, two = (la._structure.sums["matrix"] for la in (exact, drawn))
    torch.testing.assert_close(one, two, rtol=0.03, atol=0.03 * float(one.max()))


def test_no_example_counts() -> None:
    with pytest.raises(ValueError, match="every training example is ignored or has the weight 0"):
        laplace(tb.Categorical(), (X, CLASSES, torch.zeros(12)), "kronecker")
    with pytest.raises(ValueError, match="weights contain a negative"):
        laplace(tb.Categorical(), (X, CLASSES, -torch.ones(12)), "kronecker")


def test_a_likelihood_of_one_s_own() -> None:
    class Own(tb.Likelihood):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            return (outputs - targets).square().sum() / len(outputs)

        def predictive(self, outputs: Tensor) -> Any:
            raise NotImplementedError

    data = X, targets(tb.Bernoulli())
    with pytest.raises(ValueError, match=r"Own.loss does not take any"):
        laplace(Own(), (*data, torch.ones(12)), "diagonal")
    with pytest.raises(ValueError, match="cannot be drawn from a Own: use curvature='empirical'"):
        laplace(Own(), data, "diagonal")
    laplace(Own(), data, "diagonal", curvature="empirical")


def test_what_fit_would_infer_and_data_as_people_have_them() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 2
    la = tb.Laplace(net, (x, y), check=False)
    assert isinstance(la.likelihood, tb.Bernoulli)
    assert la.curvature == "ggn"
    assert la.predictive(x).probs.shape == (30,)
    same = {"input": torch.tensor(x).float(), "labels": torch.tensor(y)}
    for data in (same, DataLoader(TensorDataset(same["input"], same["labels"]), 7)):
        other = tb.Laplace(net, data, check=False)
        torch.testing.assert_close(
            la.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-5, atol=0
        )
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(x, columns=list("abc"))
    other = tb.Laplace(net, (frame, pandas.Series(y)), check=False)
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())


class Several(nn.Module):
    """Returns more than the likelihood's tensor."""

    def __init__(self, net: nn.Module, form: str) -> None:
        super().__init__()
        self.net, self.form = net, form

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        if self.form == "dict":
            return {"logits": logits, "hidden": x}
        return (x.sum(), logits)


@pytest.mark.parametrize(("form", "output"), [("dict", None), ("dict", "logits"), ("tuple", 1)])
def test_networks_that_return_more(form: str, output: str | int | None) -> None:
    plain = tb.Laplace(network(3), (X, CLASSES), check=False)
    la = tb.Laplace(
        Several(network(3), form), (X, CLASSES), subset="all", output=output, check=False
    )
    assert torch.equal(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    probs = [each.predictive(X, "probit").probs for each in (la, plain)]
    assert torch.equal(*probs)
    last = tb.Laplace(
        Several(network(3), form), (X, CLASSES), subset="last_layer", output=output, check=False
    )
    assert last.names == ["net.3.weight", "net.3.bias"]


def test_the_last_layer_that_is_trained() -> None:
    net = network(3)
    net[3].requires_grad_(False)
    assert tb.Laplace(net, (X, CLASSES), subset="last_layer", check=False).names == [
        "0.weight", "0.bias",
    ]  # fmt: skip


def test_fit_gives_its_weights_to_laplace() -> None:
    data, options = (X, CLASSES), {"epochs": 2, "batch_size": 5, "progress": False}
    run = tb.fit(network(3), data, "laplace", weights=TIMES.double(), evidence=False, **options)
    expected = tb.Laplace(run.model, (X, CLASSES, TIMES.double()), subset="last_layer", check=False)
    spread = run.posterior.std()  # type: ignore[attr-defined]
    for name, std in expected.posterior().std().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(spread[name], std)
