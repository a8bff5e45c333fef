"""Samplers that tune themselves: the descent, what is measured, and the change of coordinates."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.survey import Measured
from torchbayes.optim.warmup import PlannedRun, WarmUp, langevin_step, momentum_step
from torchbayes.prior import GroupLaplacePrior

N, STEPS, BATCH = 200, 200, 20
SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "sgld": tb.SGLD,
    "psgld": tb.PSGLD,
    "sghmc": tb.SGHMC,
    "sgnht": tb.SGNHT,
    "sgnht, one thermostat": lambda model, **k: tb.SGNHT(model, per_parameter=False, **k),
    "atmc": tb.ATMC,
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(N, 3, generator=seeded(1)) * torch.tensor([1.0, 3.0, 0.3])
Y = X @ torch.tensor([[1.0], [-0.5], [0.2]]) + torch.randn(N, 1, generator=seeded(2))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def walk(model: nn.Module, sampler: Sampler, updates: int, batch: int, seed: int = 3) -> None:
    generator = seeded(seed)
    for _ in range(updates):
        rows = torch.randint(N, (batch,), generator=generator) if batch < N else slice(None)
        model.zero_grad()
        (0.5 * F.mse_loss(model(X[rows]), Y[rows])).backward()
        sampler.step()


def made(name: str, model: nn.Module, **options: Any) -> Sampler:
    facts = {"train_size": N, "steps": STEPS, "batch_size": BATCH, "generator": seeded()}
    return SAMPLERS[name](model, **{**facts, **options})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@every_sampler
@pytest.mark.parametrize("batch", [BATCH, N])
def test_every_phase_resumes_bit_equal(name: str, batch: int) -> None:
    course = PlannedRun(STEPS, batch).warm_up(N)
    assert course is not None
    marks = (course.descent, course.surveyed, course.tuned, course.held, course.updates)
    for mark in (m - 3 for m in marks):
        model = net()
        sampler = made(name, model, batch_size=batch)
        walk(model, sampler, mark, batch)
        file = io.BytesIO()
        torch.save([model.state_dict(), sampler.state_dict()], file)
        walk(model, sampler, 8, batch, seed=4)
        file.seek(0)
        weight, state = torch.load(file, weights_only=True)
        other = net()
        other.load_state_dict(weight)
        again = made(name, other, batch_size=batch, generator=seeded(9))
        again.load_state_dict(state)
        walk(other, again, 8, batch, seed=4)
        assert torch.equal(weights(model), weights(other)), mark


@every_sampler
@pytest.mark.parametrize("prior", [2.0, GroupLaplacePrior(1.0)])
def test_what_runs_is_the_papers_update_in_scaled_coordinates(name: str, prior: Any) -> None:
    model = net().double()
    sampler = made(name, model, prior=prior)
    generator = seeded(3)
    x, y = X.double(), Y.double()

    def gradient(rows: Tensor) -> None:
        model.zero_grad()
        (0.5 * F.mse_loss(model(x[rows]), y[rows])).backward()

    for _ in range(sampler.warmup + 5):
        gradient(torch.randint(N, (BATCH,), generator=generator))
        sampler.step()
    gradient(torch.randint(N, (BATCH,), generator=generator))
    params = list(model.parameters())
    scale = torch.cat([sampler.state[p]["scale"].flatten() for p in params])
    theta = weights(model)
    named = {n: p.detach() for n, p in model.named_parameters()}
    log_prior = torch.cat([g.flatten() for g in sampler.prior.grad(named).values()])
    force = N * torch.cat([p.grad.flatten() for p in params]) - log_prior  # ∇U
    buffers = [
        torch.cat([sampler.state[p][b].flatten() for p in params]).clone() for b in sampler.buffers
    ]
    eta = torch.empty_like(theta)
    copy = torch.Generator()
    copy.set_state(sampler.generator.get_state())
    eta.normal_(generator=copy)
    group = sampler.param_groups[0]
    phi = theta / scale
    scalars = sampler.scalars(group, sampler.state[params[0]]["step"] + 1)
    sampler.update(phi, *buffers, scale * force / N, eta, **scalars, n=float(N), delta=0.0)
    sampler.step()
    torch.testing.assert_close(weights(model), phi * scale)


def test_whole_data_sets_show_the_curvature_of_every_weight() -> None:
    """With inputs that are uncorrelated, the curvature of a linear layer is a diagonal: N·E x² + δ."""
    model = nn.Linear(3, 1, bias=False)
    sampler = tb.SGLD(model, train_size=N, steps=2000, generator=seeded())
    q, _ = torch.linalg.qr(torch.randn(N, 3, generator=seeded(5)))
    x = q * torch.tensor([1.0, 4.0, 16.0])
    for _ in range(sampler.warmup + 1):
        model.zero_grad()
        (0.5 * F.mse_loss(model(x), torch.ones(N, 1))).backward()
        sampler.step()
    exact = np.array([1.0, 16.0, 256.0]) + 1.0
    scale = sampler.state[model.weight]["scale"].flatten().double().numpy()
    shrunk = 0.9 * exact + 0.1 * exact.mean()  # so that no step is wild
    found = scale**-2
    ratio = found / found.sum() / (shrunk / shrunk.sum())
    assert np.abs(np.log(ratio)).max() < np.log(2)


def test_the_course_of_a_run() -> None:
    assert PlannedRun(4000).warm_up(N) == WarmUp(1800, 4000, 100, N)
    short = PlannedRun(640, 32).warm_up(N)
    assert short is not None
    assert (short.descent, short.updates, short.batch) == (448, 544, 32)
    cold = PlannedRun(640, 32).warm_up(N, cold=True)
    assert cold is not None
    assert (cold.descent, cold.updates) == (512, 576)
    assert PlannedRun(10).warm_up(N) is None  # no time for one
    assert PlannedRun(4000, 32, 0.0).warm_up(N) is None
    with pytest.raises(ValueError, match=r"burn_in is 1\.5"):
        PlannedRun(100, 10, 1.5).warm_up(N)
    with pytest.raises(ValueError, match="steps is 0"):
        tb.SGLD(net(), train_size=N, steps=0)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("burn_in", [None, 0.1, 0.3, 0.5, 0.9])
def test_every_phase_has_updates_in_short_runs_too(burn_in: float | None, cold: bool) -> None:
    courses = [PlannedRun(steps, BATCH, burn_in).warm_up(N, cold) for steps in range(1, 3001)]
    found = [course for course in courses if course is not None]
    assert min(course.updates for course in found) == WarmUp.LEAST
    for c in found:
        assert 0 < c.descent < c.surveyed < c.tuned < c.held < c.updates < c.steps, c


@every_sampler
@pytest.mark.parametrize("batch", [BATCH, N])
@pytest.mark.parametrize(
    ("steps", "burn_in", "cold"),
    [(23, None, False), (50, None, False), (23, None, True), (74, None, True), (67, 0.3, False)],
)
def test_short_runs_are_tuned_too(
    name: str, batch: int, steps: int, burn_in: float | None, cold: bool
) -> None:
    model = many_weights() if cold else net()
    sampler = made(name, model, steps=steps, batch_size=batch)
    if burn_in is not None:
        sampler._warm = PlannedRun(steps, batch, burn_in).warm_up(N)
    assert 0 < sampler.warmup < steps
    walk(model, sampler, steps, batch)
    for p in model.parameters():
        assert "warmup" not in sampler.state[p]
        assert "scale" in sampler.state[p]
        assert bool(p.isfinite().all())


def test_a_given_step_is_the_papers_sampler_from_the_first_update() -> None:
    for name, options in (
        ("sgld", {"lr": 1e-4}),
        ("psgld", {"lr": 1e-6}),
        ("sghmc", {"average_step": 0.01}),
        ("sgnht", {"momentum": 0.9}),
        ("atmc", {"max_step": 0.1}),
    ):
        model = net()
        sampler = made(name, model, **options)
        assert sampler.warmup == 0
        walk(model, sampler, 2, BATCH)
        assert "scale" not in sampler.state[model[0].weight]


@pytest.mark.parametrize("noise", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("top", [1.0, 100.0])
def test_steps_keep_their_budgets(noise: float, top: float) -> None:
    for samples in (100, 2000, 100_000):
        found = Measured(noise, top, left=200, samples=samples)
        epsilon, boost = langevin_step(found)
        assert epsilon * noise / 4 <= 0.1 + 1e-9  # added to the variance
        assert epsilon * top <= 1
        assert boost * epsilon * top <= 1 + 1e-9 or boost == 1
        s, f, boost = momentum_step(found)
        assert s * s * noise / (2 * f) <= 0.3 + 1e-9  # the gradient's share of the noise
        assert s * s * top <= 0.5
        assert f < 1
        assert boost >= 1


@pytest.mark.parametrize(
    ("method", "train_size", "batch_size"),
    [("sgld", 1000, 128), ("psgld", 100, 32), ("sghmc", 1000, 32), ("sgnht", 100, 100), ("atmc", 1000, 32)],
)  # fmt: skip
def test_defaults_have_the_exact_width(method: str, train_size: int, batch_size: int) -> None:
    found = tb.verify(method, train_size=train_size, batch_size=batch_size)
    assert 0.9 < found.std_ratio < 1.12, found
    assert found.mean_error < 0.2


def test_thermostats_do_not_heat_up_in_the_descent() -> None:
    """Whole batches have no noise: a thermostat above 0 would make the chain too cold."""
    model = nn.Linear(3, 1)
    sampler = tb.ATMC(model, train_size=N, steps=1000, generator=seeded())
    walk(model, sampler, sampler.warmup + 100, N)
    group = sampler.param_groups[0]
    assert abs(sampler.state[model.weight]["thermostat"]).mean() < 0.3 * group["friction"]
    assert sampler.vitals()["temperature"][""] < 5


def many_weights() -> nn.Module:
    """1,250 weights for 200 examples."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 249), nn.Tanh(), nn.Linear(249, 1, bias=False), nn.Flatten())


@every_sampler
def test_many_weights_per_example_make_the_posterior_cold(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchbayes")
    sampler = made(name, many_weights())
    group = sampler.param_groups[0]
    expected = (4 * N / 1245) ** 2
    assert group["temperature"] == group["prior_temperature"] == pytest.approx(expected)
    assert f"temperature={expected:.2g}"[:-1] in repr(sampler)
    assert caplog.messages == [
        "temperature 0.41: 1,245 weights for 200 examples; temperature=1 for the exact posterior"
    ]
    for exact in (made(name, net()), made(name, many_weights(), temperature=1.0)):
        assert exact.param_groups[0]["temperature"] == 1
        assert exact.param_groups[0]["prior_temperature"] == 1


def temperatures(sampler: Sampler) -> list[tuple[float, float]]:
    return [(g["temperature"], g["prior_temperature"]) for g in sampler.param_groups]


@every_sampler
def test_groups_that_name_a_temperature_keep_it(name: str) -> None:
    groups = [{"params": "0.*"}, {"params": "2.*", "temperature": 1.0}]
    cold = pytest.approx((4 * N / 1245) ** 2)
    sampler = made(name, many_weights(), params=groups)
    assert temperatures(sampler) == [(cold, cold), (1.0, 1.0)]
    sampler.cool(0.3)
    assert temperatures(sampler) == [(0.3, 0.3), (1.0, 1.0)]


@every_sampler
def test_groups_that_are_added_are_as_cold(name: str) -> None:
    sampler = made(name, many_weights(), params="0.*")
    sampler.add_param_group({"params": "2.*"})
    cold = pytest.approx((4 * N / 996) ** 2)
    assert temperatures(sampler) == [(cold, cold)] * 2
    sampler = made(name, many_weights(), params="0.*")
    sampler.add_param_group({"params": "2.*", "temperature": 0.5})
    assert temperatures(sampler) == [(cold, cold), (0.5, 1.0)]


def test_nothing_is_cooled_if_all_groups_name_a_temperature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="torchbayes")
    sampler = made("sgld", many_weights(), params=[{"params": "*", "temperature": 0.5}])
    assert temperatures(sampler) == [(0.5, 1.0)]
    assert sampler.warmup == made("sgld", net()).warmup  # the course of an exact posterior
    assert not caplog.messages


@pytest.mark.parametrize("prior", [5.0, GroupLaplacePrior()])
def test_a_cold_sampler_is_one_of_a_sharper_likelihood_and_prior(prior: Any) -> None:
    """Temperature T of both is n/T and, of a Gaussian prior, δ/T: the same chain, number for number."""
    cold, given = many_weights(), many_weights()
    mine = made("atmc", cold, prior=prior)
    t = mine.param_groups[0]["temperature"]
    sharper = prior / t if isinstance(prior, float) else Sharper(prior, t)
    its = made("atmc", given, prior=sharper, temperature=t)
    its._warm = mine._warm  # the same course
    walk(cold, mine, STEPS, BATCH)
    walk(given, its, STEPS, BATCH)
    assert torch.allclose(weights(cold), weights(given), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(weights(cold), weights(many_weights()), atol=1e-2)


class Sharper(tb.Prior):
    """A prior to the power 1/T."""

    def __init__(self, prior: tb.Prior, temperature: float) -> None:
        self.prior, self.temperature = prior, temperature

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        return self.prior.log_prob_of(name, weight) / self.temperature


def test_stacked_chains_have_the_temperature_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cooled = []
    cool = Sampler.cool
    monkeypatch.setattr(
        Sampler,
        "cool",
        lambda self, t: (cooled.append((t, self.model[0].weight.dim())), cool(self, t)),
    )
    make = lambda: nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 1))  # noqa: E731
    tb.fit(
        make, (X, Y), "sgld", epochs=10, batch_size=50, progress=False, chains=3, side_by_side=True
    )
    assert cooled == [(pytest.approx((4 * N / 1001) ** 2), dim) for dim in (2, 3)]
