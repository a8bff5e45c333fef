"""Counts and heavy-tailed noise against scipy."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Distribution, Gamma, Normal, Poisson

import torchbayes as tb


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(25,), (25, 1), (25, 3)])
def test_poisson_loss_is_scipys(shape: tuple[int, ...]) -> None:
    outputs = 2 * normals(*shape)
    counts = torch.poisson(outputs.exp(), generator=torch.Generator().manual_seed(1))
    each = -stats.poisson(outputs.exp().numpy()).logpmf(counts.numpy()).reshape(25, -1).sum(1)
    for kind in (torch.float64, torch.long):
        assert float(tb.Poisson().loss(outputs, counts.to(kind))) == pytest.approx(each.mean())
    weights = normals(25, seed=2).exp()
    weighted = (each * weights.numpy()).mean()
    assert float(tb.Poisson().loss(outputs, counts, weights)) == pytest.approx(weighted)
    p = tb.Poisson().predictive(outputs[None])
    np.testing.assert_allclose(p.log_prob(counts), -each, rtol=1e-9)


def test_a_rate_that_underflows_has_a_finite_loss() -> None:
    loss = tb.Poisson().loss(torch.tensor([-200.0]), torch.tensor([1.0]))
    assert float(loss) == pytest.approx(200.0)


@pytest.mark.parametrize("wrong", [-1.0, 0.5, math.nan])
def test_poisson_refuses_what_is_no_count(wrong: float) -> None:
    with pytest.raises(ValueError, match="which is no count"):
        tb.Poisson().loss(torch.zeros(2), torch.tensor([1.0, wrong]))


@pytest.mark.parametrize("df", [0.7, 2.0, 4.0, 30.0])
def test_student_t_loss_is_scipys(df: float) -> None:
    outputs, targets = normals(40, 2), 5 * normals(40, 2, seed=1)
    each = -stats.t(df, outputs.numpy(), 0.5).logpdf(targets.numpy()).sum(1)
    likelihood = tb.StudentT(df, 0.5).double()
    assert float(likelihood.loss(outputs, targets)) == pytest.approx(each.mean(), rel=1e-6)
    weights = normals(40, seed=2).exp()
    weighted = (each * weights.numpy()).mean()
    assert float(likelihood.loss(outputs, targets, weights)) == pytest.approx(weighted, rel=1e-6)


def test_predicted_student_t_noise_is_scipys() -> None:
    outputs, targets = normals(30, 4), normals(30, 2, seed=1)
    place, scale = outputs.numpy()[:, :2], np.exp(outputs.numpy()[:, 2:])
    truth = -stats.t(3.0, place, scale).logpdf(targets.numpy()).sum(1).mean()
    likelihood = tb.StudentT(3.0, predicted=True)
    assert float(likelihood.loss(outputs, targets)) == pytest.approx(truth, rel=1e-6)
    with pytest.raises(ValueError, match="even number of outputs"):
        likelihood.loss(outputs[:, :3], targets)


def test_scale_and_degrees_of_freedom_are_learned() -> None:
    """The maximum of the likelihood is SciPy's; the location is known to be 0."""
    values = torch.from_numpy(stats.t(5.0, 0, 0.3).rvs(4000, random_state=0))
    df, _, scale = stats.t.fit(values.numpy(), floc=0)
    noise = tb.StudentT(learned=True, learned_df=True).double()
    optimizer = torch.optim.LBFGS(noise.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = noise.loss(torch.zeros(4000).double(), values)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)
    assert float(noise.df.detach()) == pytest.approx(df, rel=1e-2)
    assert float(noise.scale.detach()) == pytest.approx(scale, rel=1e-2)


def test_bad_student_t_settings_are_refused() -> None:
    for bad in ({"df": 0.0}, {"df": math.inf}, {"df": 2.0, "learned_df": True}):
        with pytest.raises(ValueError, match="df is"):
            tb.StudentT(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale is -1"):
        tb.StudentT(scale=-1.0)
    with pytest.raises(ValueError, match="either learned or predicted"):
        tb.StudentT(learned=True, predicted=True)


def test_predictions_keep_their_noise_and_can_be_pickled() -> None:
    noise = tb.StudentT(4.0, 0.5, learned=True)
    p = noise.predictive(torch.zeros(2, 3, 1))
    before = p.quantile(0.9)
    with torch.no_grad():
        noise.log_std.add_(1)
    torch.testing.assert_close(p.quantile(0.9), before)
    for likelihood in (noise, tb.Poisson(), tb.GaussianNoise()):
        p = likelihood.predictive(torch.zeros(2, 3, 1))
        copy = pickle.loads(pickle.dumps(p))
        torch.testing.assert_close(copy.quantile(0.9), p.quantile(0.9))


@pytest.mark.parametrize("likelihood", [tb.Poisson(), tb.GaussianNoise(), tb.StudentT()])
def test_outputs_in_half_precision_lose_nothing_in_the_loss(likelihood: tb.Likelihood) -> None:
    outputs, targets = normals(50, 1).bfloat16(), torch.arange(50.0)[:, None]
    exact = likelihood.loss(outputs.float(), targets)
    assert float(likelihood.loss(outputs, targets)) == float(exact)
    p = likelihood.predictive(outputs[None])
    assert p.log_prob(targets).dtype == torch.float32


# -- Errors of torch's distributions ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4, -1e4])
@pytest.mark.parametrize(
    "likelihood",
    [
        tb.GaussianNoise(predicted=True),
        tb.StudentT(predicted=True),
        tb.GaussianNoise(),
        tb.Poisson(),
    ],
)
def test_outputs_that_diverge_give_a_loss_not_an_error(
    likelihood: tb.Likelihood, bad: float
) -> None:
    """`fit` sees that the loss is not finite and says where; see tests/world/test_problem_shapes.py."""
    outputs = torch.full((3, 2), bad)
    targets = torch.ones(3, 1 if getattr(likelihood, "predicted", False) else 2)
    likelihood.loss(outputs, targets)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def checked_by_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch's Dynamo turns torch's own checks off, in whatever package."""
    monkeypatch.setattr(Distribution, "_validate_args", request.param)


@pytest.mark.usefixtures("checked_by_torch")
@pytest.mark.parametrize(
    ("function", "outputs", "error", "message"),
    [
        (lambda o: Normal(o, o), -1.0, ValueError, "parameter scale .*outputs.exp"),
        (lambda o: Normal(o, o.exp()), math.nan, FloatingPointError, "outputs are not finite"),
    ],
)
def test_a_distribution_that_cannot_be_made_gives_one_sentence(
    function: Callable[[Tensor], Distribution], outputs: float, error: Any, message: str
) -> None:
    likelihood = tb.likelihood.Observation(function)
    with pytest.raises(error, match=message) as caught:
        likelihood.loss(torch.full((40, 1), outputs), torch.zeros(40, 1))
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("checked_by_torch")
@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda o: Poisson(o.exp()), "Poisson"), (lambda o: Gamma(o.exp(), 1.0), "Gamma")],
)
def test_targets_that_a_distribution_cannot_have_give_one_sentence(
    function: Callable[[Tensor], Distribution], name: str
) -> None:
    likelihood = tb.likelihood.Observation(function)
    targets = torch.linspace(-2.5, 3, 40)[:, None]
    for ask in (
        lambda: likelihood.loss(torch.zeros(40, 1), targets),
        lambda: likelihood.predictive(torch.zeros(2, 40, 1)).log_prob(targets),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot have all .* from -2.5 to 3") as caught:
            ask()
        assert "\n" not in str(caught.value)
