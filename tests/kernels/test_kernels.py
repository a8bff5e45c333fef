"""The compiled loops against NumPy in double precision and against the same updates in torch's operations."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbayes import kernels
from torchbayes.core.noise import gaussians_, normal_, normals_
from torchbayes.core.workspace import Workspace
from torchbayes.kernels import dispatch, loops
from torchbayes.optim import ATMC, IVON, PSGLD, SGHMC, SGLD, SGNHT, VOGN
from torchbayes.optim.atmc import atmc_update
from torchbayes.optim.ivon import ivon_draw, ivon_scaled_update, ivon_update
from torchbayes.optim.natural_gradient import WeightOptimizer, bounded_draw
from torchbayes.optim.psgld import psgld_update
from torchbayes.optim.sampler import Sampler
from torchbayes.optim.sghmc import sghmc_update
from torchbayes.optim.sgld import sgld_update
from torchbayes.optim.sgnht import sgnht_update
from torchbayes.optim.vogn import vogn_draw, vogn_scaled_update, vogn_update
from torchbayes.prior import GaussianPrior, ScaleMixturePrior
from torchbayes.variational import MeanField
from torchbayes.variational.draw import bbb_draw, bbb_gradients
from torchbayes.variational.hidden_units import add_units, coast, four_steps, unit_step
from torchbayes.variational.hypernet_sgd import bounded_gradient
from torchbayes.variational.kl import mixture
from torchbayes.variational.softplus import softplus

SIZE = 20_011  # several chunks, the last of them odd


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def philox(counters: np.ndarray, k0: int, k1: int) -> np.ndarray:
    """Philox-4x32-10 as in the paper's figure, for counters (i, 0, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counters.astype(np.uint64), *(np.zeros(len(counters), np.uint64) for _ in range(3))]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [
            (b >> shift) ^ c[1] ^ np.uint64(k0),
            b & mask,
            (a >> shift) ^ c[3] ^ np.uint64(k1),
            a & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(c)


def test_the_reference_generator_has_its_authors_known_answer() -> None:
    words = [int(word) for word in philox(np.zeros(1), 0, 0)[:, 0]]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_normal_numbers_are_box_and_mullers_of_philox() -> None:
    ours = normal_(torch.empty(SIZE), seeded(3)).numpy()
    k0, k1 = torch.empty(2, dtype=torch.int64).random_(0, 1 << 32, generator=seeded(3)).tolist()
    words = philox(np.arange(-(-SIZE // 4)), k0, k1).astype(np.float64)
    numbers = []
    for first, second in ((0, 1), (2, 3)):
        radius = np.sqrt(-2 * np.log((words[first] + 0.5) / 2**32))
        angle = 2 * np.pi * words[second] / 2**32
        numbers += [radius * np.cos(angle), radius * np.sin(angle)]
    chunks = -(-SIZE // 1024)
    truth = np.zeros((4, chunks * 256))
    truth[:, : words.shape[1]] = numbers
    # In a chunk of 1,024 the four numbers of a counter lie 256 apart.
    truth = truth.reshape(4, chunks, 256).transpose(1, 0, 2).ravel()
    whole = SIZE // 1024 * 1024  # the counters of the last chunk were not all computed here
    # Where u is next to 1, log u is the rounding of u: 2⁻²⁴ under the root.
    np.testing.assert_allclose(ours[:whole], truth[:whole], rtol=3e-6, atol=4e-4)
    assert np.abs(ours[:whole] - truth[:whole]).mean() < 1e-6


@pytest.mark.parametrize(
    ("function", "truth", "points"),
    [
        (loops._log, np.log, np.geomspace(2.0**-33, 1, 400)),
        (loops._tanh_ratio, lambda y: np.tanh(y) / y, np.geomspace(1e-30, 1e4, 400)),
        (loops._tanh_ratio, lambda y: np.tanh(y) / y, -np.linspace(1e-3, 12, 400)),
    ],
)
def test_functions(
    function: Callable[..., float], truth: Callable[..., np.ndarray], points: np.ndarray
) -> None:
    points = points.astype(np.float32)
    ours = np.array([function(x) for x in points])
    np.testing.assert_allclose(ours, truth(points.astype(np.float64)), rtol=5e-7, atol=1e-12)


def test_the_ratio_is_one_at_zero() -> None:
    assert loops._tanh_ratio(np.float32(0)) == pytest.approx(1, abs=2e-7)


def columns(count: int) -> list[Tensor]:
    """Weights, a sampler's tensors and gradients; the last sampler's tensor is a thermostat of any sign."""
    torch.manual_seed(0)
    return [0.3 * torch.randn(SIZE) for _ in range(count)]


def true_sgld(theta: np.ndarray, g: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    force = 100.0 * g + 1.5 * theta
    return [theta - 1e-3 / 2 * force + np.sqrt(1e-3) * eta]


def true_psgld(
    theta: np.ndarray, v: np.ndarray, g: np.ndarray, eta: np.ndarray
) -> list[np.ndarray]:
    force = 100.0 * g + 1.5 * theta
    v = 0.9 * v + 0.1 * (force / 100) ** 2
    metric = 1 / (1e-3 + np.sqrt(v / (1 - 0.9**3)))
    return [theta - 1e-4 / 2 * metric * force + np.sqrt(1e-4 * metric) * eta, v]


def true_sghmc(
    theta: np.ndarray, p: np.ndarray, g: np.ndarray, eta: np.ndarray
) -> list[np.ndarray]:
    h, m, d = 1e-2, 9.0, 8.0
    p = (1 - h * d) * p - h * (100.0 * g + 1.5 * theta) + np.sqrt(2 * h * d * m) * eta
    return [theta + h * p / m, p]


def true_draw(x: np.ndarray, mu: np.ndarray, s: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    return [mu + 0.1 * eta / np.sqrt(s + 0.3)]


def true_gaussians(
    x: np.ndarray, mean: np.ndarray, std: np.ndarray, eta: np.ndarray
) -> list[np.ndarray]:
    return [mean + std * eta]


def true_vogn(
    mu: np.ndarray, m: np.ndarray, s: np.ndarray, g: np.ndarray, h: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    m = 0.9 * m + g + 0.02 * (mu - 0.3)  # lines 17 to 19
    s = (1 - 0.05) * s + 0.05 * 3 * h
    return [mu - 0.1 * m / (s + 0.02 + 0.3), m, s]


def true_ivon(
    mu: np.ndarray, m: np.ndarray, h: np.ndarray, g: np.ndarray, theta: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    lam, delta, beta1, beta2, t, alpha, h0, xi = 5.0, 0.02, 0.9, 0.99, 3, 0.1, 0.4, 2.0
    estimate = lam * g * (theta - mu) * (h + delta)
    m = beta1 * m + (1 - beta1) * g
    new = beta2 * h + (1 - beta2) * estimate
    new = new + 0.5 * (1 - beta2) ** 2 * (h - estimate) ** 2 / (h + delta)
    step = (m / (1 - beta1**t) + delta * (mu - 0.3)) / (new + delta)
    return [mu - alpha * (h0 + delta) * np.clip(step, -xi, xi), m, new]


def true_vogn_scaled(
    mu: np.ndarray, m: np.ndarray, s: np.ndarray, g: np.ndarray, h: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    m = 0.9 * m + g + 0.02 * (mu - 0.3)
    s = (1 - 0.05) * s + 0.05 * 3 * h
    return [mu - 0.1 * np.clip(0.4 * m / np.sqrt(s / 32), -3, 3), m, s]


def true_ivon_scaled(
    mu: np.ndarray, m: np.ndarray, h: np.ndarray, v: np.ndarray, g: np.ndarray,
    product: np.ndarray, _eta: np.ndarray,
) -> list[np.ndarray]:  # fmt: skip
    lam, delta, beta1, beta2, t = 5.0, 0.02, 0.9, 0.99, 3
    u = np.maximum(h + delta, 0.5)
    estimate = lam * product * u
    new = beta2 * h + (1 - beta2) * estimate + 0.5 * (1 - beta2) ** 2 * (h - estimate) ** 2 / u
    pulled = g + delta * (mu - 0.3)
    m, v = beta1 * m + (1 - beta1) * pulled, 0.999 * v + 0.001 * pulled**2
    return [mu - 0.1 * m / (1 - beta1**t) / np.sqrt(v / (1 - 0.999**t)), m, new, v]


def true_bounded(
    _theta: np.ndarray, mu: np.ndarray, s: np.ndarray, eta: np.ndarray
) -> list[np.ndarray]:
    return [mu + eta / np.sqrt(50 * np.maximum(s + 0.1, 0.6))]


def true_softplus(
    _std: np.ndarray, _slope: np.ndarray, rho: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    rho = np.clip(rho, -87.0, 79.0)
    return [np.logaddexp(0, rho), 1 / (1 + np.exp(-rho))]


def true_bbb(*columns: np.ndarray) -> list[np.ndarray]:
    *_, mean, rho, eta = columns
    std, slope = true_softplus(rho, rho, rho, eta)
    return [mean + std * eta, eta, std, slope]


def true_bbb_gradients(*columns: np.ndarray) -> list[np.ndarray]:
    *_, g, noise, std, slope, mean, _eta = columns
    # The KL term's weight is 0.1, the prior N(0.2, 1/1.5).
    to_mean = g + 0.1 * 1.5 * (mean - 0.2)
    return [to_mean, slope * (g * noise + 0.1 * (1.5 * std - 1 / std))]


def true_mixture(_pull: np.ndarray, w: np.ndarray, _eta: np.ndarray) -> list[np.ndarray]:
    """−∂ log(0.25 N(w; 0, 1) + 0.75 N(w; 0, 0.1²))."""
    wide, narrow = 0.25 * np.exp(-(w**2) / 2), 7.5 * np.exp(-(w**2) / 0.02)
    return [(wide * w + narrow * w / 0.01) / (wide + narrow)]


def true_unit(w: np.ndarray, v: np.ndarray, g: np.ndarray, _eta: np.ndarray) -> list[np.ndarray]:
    d = 0.4 * g + 0.02 * w
    v = 0.9 * v + d
    return [w - 0.1 * (d + 0.9 * v), v]


def true_four(*columns: np.ndarray) -> list[np.ndarray]:
    *units, g, _eta = columns
    w, v = [], []
    for place, a in enumerate((0.4, -1.0, 0.0, 2.0)):
        d = a * g + 0.02 * units[place]
        v.append(0.9 * units[4 + place] + d)
        w.append(units[place] - 0.1 * v[-1])  # without Nesterov's momentum
    return [*w, *v]


def true_coast(w: np.ndarray, v: np.ndarray, _eta: np.ndarray) -> list[np.ndarray]:
    for alpha, mu, decay, nesterov in COAST.reshape(-1, 4):
        v = mu * v + decay * w
        w = w - alpha * (decay * w + mu * v if nesterov else v)
    return [w, v]


def true_units(total: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    *units, _eta = columns
    return [total + sum(a * w for a, w in zip(ACTIVATIONS, units, strict=True))]


def true_bounded_gradient(
    _bounded: np.ndarray, square: np.ndarray, g: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    square = 0.99 * square + 0.01 * g**2
    return [0.5 * g / (np.sqrt(square * 3) + 1e-15), square]


COAST = np.array([0.1, 0.9, 0.02, 1.0, 0.2, 0.8, 0.05, 0.0, 0.3, 0.9, 0.0, 1.0])
ACTIVATIONS = (0.5, 1.0, 0.0, 2.0, -1.0, 0.1, 0.3, 0.7)
SGD = {"alpha": 0.1, "mu": 0.9, "decay": 0.02}
MIXTURE = {"wide": 1.0, "excess": 99.0, "odds": float(np.log(0.75 / 0.25) + np.log(10))}
BOUNDS = {"low": -87.0, "high": 79.0}


def thermostat(adaptive: bool, d: float, h: float, c: float) -> Callable[..., list[np.ndarray]]:
    def update(
        theta: np.ndarray, p: np.ndarray, xi: np.ndarray, g: np.ndarray, eta: np.ndarray
    ) -> list[np.ndarray]:
        m = 9.0
        big_m = m * np.sqrt(1 + (p / (m * c)) ** 2)
        alpha = np.maximum(d - xi, 0) if adaptive else d
        beta = (alpha + xi) * m / big_m
        force = 100.0 * g + 1.5 * theta
        p = (
            np.exp(-beta * h) * p
            + np.expm1(-beta * h) / beta * force
            + np.sqrt(-alpha * m * np.expm1(-2 * beta * h) / beta) * eta
        )
        big_m = m * np.sqrt(1 + (p / (m * c)) ** 2)
        return [theta + h * p / big_m, p, xi + h * (m * p**2 / big_m**2 - m**3 / big_m**3)]

    return update


def thermostat_scalars(d: float, h: float, c: float) -> dict[str, float]:
    return {"h": h, "m": 9.0, "c": c, "d": d, "n": 100.0, "delta": 1.5}


Update = Callable[..., Any]
UPDATES: list[tuple[Update, int, Callable[..., list[np.ndarray]], dict[str, Any]]] = [
    (gaussians_, 3, true_gaussians, {}),
    (sgld_update, 2, true_sgld, {"epsilon": 1e-3, "n": 100, "delta": 1.5}),
    (
        psgld_update, 3, true_psgld,
        {"epsilon": 1e-4, "alpha": 0.9, "lam": 1e-3, "n": 100, "delta": 1.5, "size": 100, "t": 3},
    ),
    (
        sghmc_update, 3, true_sghmc,
        {"h": 1e-2, "m": 9.0, "d": 8.0, "variance": 0.0, "n": 100, "delta": 1.5},
    ),
    (softplus, 3, true_softplus, BOUNDS),
    (bbb_draw, 6, true_bbb, BOUNDS),
    (bbb_gradients, 7, true_bbb_gradients, {"scale": 0.1, "m": 0.2, "delta": 1.5}),
    (mixture, 2, true_mixture, MIXTURE),
    (unit_step, 3, true_unit, {"a": 0.4, **SGD, "nesterov": 1.0}),
    (four_steps, 9, true_four, {"a0": 0.4, "a1": -1, "a2": 0, "a3": 2, **SGD, "nesterov": 0.0}),
    (coast, 2, true_coast, {"steps": COAST}),
    (add_units, 9, true_units, {f"a{i}": a for i, a in enumerate(ACTIVATIONS)}),
    (bounded_gradient, 3, true_bounded_gradient, {"keep": 0.99, "debias": 3, "share": 0.5, "tiny": 1e-15}),
    (vogn_draw, 3, true_draw, {"delta": 0.1, "gamma": 0.2, "tau": 0.5, "n": 50}),
    (ivon_draw, 3, true_draw, {"delta": 0.3, "lam": 100.0}),
    (
        vogn_update, 5, true_vogn,
        {
            "alpha": 0.1, "beta1": 0.9, "beta2": 0.05, "delta": 0.02, "gamma": 0.3, "prior_mean": 0.3,
            "h_factor": 3.0,
        },
    ),
    (bounded_draw, 3, true_bounded, {"delta": 0.1, "least": 0.6, "n": 50}),
    (
        vogn_scaled_update, 5, true_vogn_scaled,
        {
            "alpha": 0.1, "beta1": 0.9, "beta2": 0.05, "delta": 0.02, "debias": 0.4, "batch": 32,
            "prior_mean": 0.3, "h_factor": 3.0,
        },
    ),
    (
        ivon_scaled_update, 6, true_ivon_scaled,
        {
            "alpha": 0.1, "beta1": 0.9, "beta2": 0.99, "t": 3, "lam": 5.0, "delta": 0.02, "least": 0.5,
            "prior_mean": 0.3,
        },
    ),
    (
        ivon_update, 5, true_ivon,
        {
            "alpha": 0.1, "beta1": 0.9, "beta2": 0.99, "t": 3, "lam": 5.0, "delta": 0.02, "h0": 0.4,
            "xi": 2.0, "prior_mean": 0.3,
        },
    ),
    *[
        (update, 4, thermostat(update is atmc_update, d, h, c), thermostat_scalars(d, h, c))
        for update in (sgnht_update, atmc_update)
        for d, h, c in [(8.0, 1e-2, np.inf), (8.0, 1e-2, 0.5), (1e-3, 1e-3, 2.0), (500.0, 0.1, 1.0)]
    ],
]  # fmt: skip


def test_every_loop_has_the_arguments_of_its_pure_function_and_is_tested_here() -> None:
    for (module, name), loop in loops.LOOPS.items():
        pure = getattr(importlib.import_module(module), name)
        if module == "torchbayes.core.noise":  # these take lists of tensors
            continue
        assert any(pure is update for update, *_ in UPDATES)
        of_loop = [n for n in inspect.signature(loop._function).parameters if n != "sums"]
        parameters = inspect.signature(pure).parameters
        assert of_loop == list(parameters)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        assert loop.scalars == [n for n, p in parameters.items() if p.kind is keyword_only]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("update", "count", "truth_of", "scalars"), UPDATES)
def test_every_loop_and_every_pure_function_is_its_formula(
    update: Update,
    count: int,
    truth_of: Callable[..., list[np.ndarray]],
    scalars: dict[str, Any],
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = columns(count)
    if update is bounded_gradient:
        given[1].abs_()  # squares
    if update in (psgld_update, gaussians_):
        given[-2].abs_()
    if update in (
        vogn_draw, ivon_draw, vogn_update, ivon_update, bounded_draw, vogn_scaled_update,
        ivon_scaled_update,
    ):  # fmt: skip
        given[2].abs_()  # the curvature
    if update is vogn_scaled_update:
        given[4].abs_()  # squares
    if update is ivon_scaled_update:
        given[3].abs_()
    if update is bbb_gradients:
        given[4].abs_().add_(0.01)  # σ
    if update in (softplus, bbb_draw):
        given[-1].mul_(100)  # a standard deviation may be as small as float32 can have it, or large
    eta = normal_(torch.empty(SIZE), seeded(5)).double().numpy()
    truth = truth_of(*(column.double().numpy() for column in given), eta)
    lists = [[column] for column in given]
    changed, read = lists[: len(truth)], lists[len(truth) :]
    before = given[-1].clone()
    if compiled:
        assert kernels.run(update, changed, read, seeded(5), **scalars) is not None
    elif update is gaussians_:
        only_noise(monkeypatch)
        gaussians_(*lists, seeded(5))
    else:
        only_noise(monkeypatch)
        Workspace().apply(update, changed, read, seeded(5), **scalars)
    for ours, right in zip(given, truth, strict=False):
        if update is softplus:
            np.testing.assert_allclose(ours.numpy(), right, rtol=3e-6)
        np.testing.assert_allclose(ours.numpy(), right, rtol=2e-5, atol=2e-6 * np.abs(right).max())
    if len(truth) < count:
        assert torch.equal(given[-1], before)  # the gradient


def only_noise(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Switch off all loops but that of random numbers, and list what is run."""
    ran: list[str] = []
    run = kernels.run

    def watched(update: Update, *rest: Any, **scalars: Any) -> Any:
        if update is not normals_:
            return None
        ran.append(update.__name__)
        return run(update, *rest, **scalars)

    monkeypatch.setattr(kernels, "run", watched)
    return ran


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the loops that are run."""
    ran: list[str] = []
    run = kernels.run

    def watched(update: Update, *rest: Any, **scalars: Any) -> Any:
        result = run(update, *rest, **scalars)
        if result is not None:
            ran.append(update.__name__)
        return result

    monkeypatch.setattr(kernels, "run", watched)
    return ran


@pytest.mark.parametrize("compiled", [True, False])
def test_the_sums_of_a_mixture(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = columns(2)
    w = given[1].double().numpy()
    if not compiled:
        only_noise(monkeypatch)
    sums = Workspace().apply(mixture, [[given[0]]], [[given[1]]], **MIXTURE)
    assert sums is not None
    u = MIXTURE["odds"] - 0.5 * 99 * w**2
    np.testing.assert_allclose(sums, [(w**2).sum(), np.logaddexp(0, u).sum()], rtol=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_sums_of_a_hypernetworks_units(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """W2ᵀg is that of the weights before the step."""
    given = columns(9)
    truth = [float(w.double() @ given[-1].double()) for w in given[:4]]
    scale = float(given[-1].norm() * given[0].norm())
    if not compiled:
        only_noise(monkeypatch)
    lists = [[column] for column in given]
    activations = {f"a{i}": float(i) for i in range(4)}
    space = Workspace()
    sums = space.apply(four_steps, lists[:8], lists[8:], **activations, **SGD, nesterov=1.0)
    assert sums is not None
    np.testing.assert_allclose(sums, truth, atol=1e-6 * scale)
    given[0].normal_(generator=seeded(3))
    truth = [float(given[0].double() @ given[-1].double())]
    one = space.apply(unit_step, [lists[0], lists[4]], lists[8:], a=1.0, **SGD, nesterov=1.0)
    assert one is not None
    np.testing.assert_allclose(one, truth, atol=1e-6 * scale)
    squares = given[1].abs_().double()
    squares = 0.9 * squares + 0.1 * given[2].double() ** 2
    found = space.apply(
        bounded_gradient, [lists[0], lists[1]], [lists[2]],
        keep=0.9, debias=2.0, share=1.0, tiny=1e-15,
    )  # fmt: skip
    assert found is not None
    np.testing.assert_allclose(found, [float((2 * squares).sqrt().sum())], rtol=1e-5)


def test_the_sums_of_a_kl_term() -> None:
    given = columns(6)
    given[5].mul_(10).sub_(5)
    mean, rho = (column.double().numpy() for column in given[4:])
    std = np.logaddexp(0, rho)
    lists = [[column] for column in given]
    sums = kernels.run(bbb_draw, lists[:4], lists[4:], seeded(), **BOUNDS)
    eta = normal_(torch.empty(SIZE), seeded()).double().numpy()
    truth = [(std**2).sum(), (mean**2).sum(), np.log(std).sum(), (eta**2).sum()]
    np.testing.assert_allclose(sums, truth, rtol=1e-6)


@pytest.mark.parametrize(
    "prior", [GaussianPrior(precision=3.0), GaussianPrior(mean=0.1, precision=3.0), None]
)
def test_bayes_by_backprop_is_that_of_torchs_operations(
    prior: GaussianPrior | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> list[Tensor]:
        mixture = ScaleMixturePrior(0.5, 1.0, 0.01)
        bayesian = MeanField(net(), prior or mixture, init_std=0.05, generator=seeded())
        torch.manual_seed(1)
        loss = bayesian(torch.randn(32, 301)).square().mean() + 1e-3 * bayesian.kl()
        loss.backward()
        return [loss.detach(), *(p.grad for p in bayesian.parameters() if p.grad is not None)]

    with monkeypatch.context() as patch:
        ran = watch(patch)
        ours = gradients()
    middle = [] if prior else ["mixture"]
    assert ran == ["bbb_draw", *middle, "bbb_gradients"]
    ran = only_noise(monkeypatch)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)
    assert ran == ["normals_"]


@pytest.mark.parametrize("update", [sgnht_update, atmc_update])
def test_no_friction_and_no_thermostat_do_not_overflow(update: Update) -> None:
    given = [[torch.ones(SIZE)], [torch.zeros(SIZE)], [torch.zeros(SIZE)], [torch.ones(SIZE)]]
    scalars = {"h": 1e-3, "m": 1.0, "c": 1.0, "d": 0.0, "n": 100.0, "delta": 0.0}
    assert kernels.run(update, given[:3], given[3:], seeded(), **scalars) is not None
    # Without friction the momentum is the force over a step.
    np.testing.assert_allclose(given[1][0], -0.1, rtol=1e-6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(301, 103), nn.Tanh(), nn.Linear(103, 7), nn.Tanh(), nn.Linear(7, 3)
    )


def chain(
    make: Callable[..., Sampler], steps: int = 10, **options: Any
) -> tuple[list[Tensor], Sampler]:
    model = net()
    inputs, targets = torch.randn(32, 301), torch.randint(3, (32,))
    sampler = make(model, train_size=1000, generator=seeded(1), **options)
    for _ in range(steps):
        sampler.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        sampler.step()
    return [p.detach() for p in model.parameters()], sampler


SAMPLERS: list[tuple[Callable[..., Sampler], dict[str, Any]]] = [
    (SGLD, {"lr": 2e-4}),
    (PSGLD, {"lr": 6e-6}),
    (SGHMC, {"lr": 0.01}),
    (SGNHT, {"lr": 0.01}),
    (SGNHT, {"max_step": 0.01}),
    (ATMC, {"lr": 0.01}),
    (ATMC, {"max_step": np.inf}),
    (ATMC, {"lr": 0.01, "prior": GaussianPrior(mean=0.1, precision=2.0)}),
]


@pytest.mark.parametrize(("make", "options"), SAMPLERS)
def test_a_chain_is_the_one_that_torchs_operations_give(
    make: Callable[..., Sampler], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ran = watch(patch)
        ours, compiled = chain(make, **options)
    assert ran == [compiled.update.__name__] * 10
    ran = only_noise(monkeypatch)
    others, eager = chain(make, **options)
    assert ran == ["normals_"] * 10
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for one, two in zip(compiled.state.values(), eager.state.values(), strict=True):
        for name in compiled.buffers:
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [VOGN, IVON])
def test_natural_gradients_are_those_of_torchs_operations(
    make: Callable[..., WeightOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> list[Tensor]:
        model = net()
        inputs, targets = torch.randn(32, 301), torch.randint(3, (32,))
        optimizer = make(model, train_size=1000, generator=seeded(1))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        return [*(p.detach() for p in model.parameters()), *filter(torch.is_tensor, state)]

    with monkeypatch.context() as patch:
        ran = watch(patch)
        ours = train()
    name = make.__name__.lower()
    assert set(ran) == {"bounded_draw", f"{name}_scaled_update"}
    ran = only_noise(monkeypatch)
    for a, b in zip(ours, train(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert set(ran) == {"normals_"}


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("openmp", [True, False])
def test_threads_do_not_change_a_chain(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(dispatch, "_openmp", lambda: None)
    monkeypatch.setattr(dispatch, "_CHUNKS_PER_THREAD", 1)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        given = [column.clone() for column in columns(4)]
        lists = [[column] for column in given]
        scalars = thermostat_scalars(8.0, 1e-2, 0.5)
        assert kernels.run(atmc_update, lists[:3], lists[3:], seeded(), **scalars) is not None
        results.append(given)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("openmp", [True, False])
def test_every_part_is_done_once_and_errors_are_raised(
    openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openmp:
        monkeypatch.setattr(dispatch, "_openmp", lambda: None)
    torch.set_num_threads(3)
    done: list[int] = []
    dispatch._share(lambda first, last: done.extend(range(first, last)), 100, 10)
    assert sorted(done) == list(range(100))

    def fail(first: int, last: int) -> None:
        raise IndexError(f"{first} to {last}")  # not to be taken for the end of the work

    with pytest.raises(IndexError, match="0 to"):
        dispatch._share(fail, 100, 10)


def test_many_small_tensors_are_one_long_one() -> None:
    sizes = [1, 0, 1023, 2, 5000, 1024, 3, 9900, 7]
    parts = [torch.empty(size) for size in sizes]
    normals_(parts, seeded())
    whole = normal_(torch.empty(sum(sizes)), seeded())
    assert torch.equal(torch.cat(parts), whole)


def test_autograd_is_told() -> None:
    weight = torch.ones(SIZE, requires_grad=True)
    loss = weight.square().sum()
    with torch.no_grad():
        gaussians_([weight], [torch.zeros(SIZE)], [torch.ones(SIZE)], seeded())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_fit() -> None:
    large = torch.zeros(SIZE)
    for fits in ([[large]], [[nn.Parameter(large)]]):
        assert kernels.run(normals_, fits, [], seeded()) == []
    for tensor in (
        torch.zeros(100), large.double(), large.to("meta"), torch.zeros(200, 300).t()
    ):  # fmt: skip
        assert kernels.run(normals_, [[tensor]], []) is None
    for other in (large.double(), torch.ones(1)):
        assert kernels.run(gaussians_, [[large]], [[large], [other]]) is None
    scalars = {"delta": [large], "gamma": 0.2, "tau": 0.5, "n": 50}  # a prior of every weight
    assert kernels.run(vogn_draw, [[large]], [[large], [large]], seeded(), **scalars) is None


def test_a_function_of_somebody_else_has_no_loop_whatever_its_name() -> None:
    def sgld_update(theta: Tensor, grad: Tensor, eta: Tensor, *, epsilon: float) -> None:
        theta.sub_(grad, alpha=epsilon).add_(eta)

    for update in (sgld_update, functools.partial(sgld_update)):
        theta, grad = torch.zeros(SIZE), torch.ones(SIZE)
        Workspace().apply(update, [[theta]], [[grad]], seeded(), epsilon=2.0)
        torch.testing.assert_close(theta, normal_(torch.empty(SIZE), seeded()) - 2)


def test_a_sampler_of_somebody_else_needs_a_pure_function_alone() -> None:
    def noisy(theta: Tensor, grad: Tensor, eta: Tensor, *, n: float, delta: float) -> None:
        theta.sub_(grad * n + theta * delta).add_(eta)

    class Noisy(Sampler):
        update = staticmethod(noisy)

        def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
            return {}

    model = nn.Linear(SIZE, 1, bias=False)
    start = model.weight.detach().clone()
    sampler = Noisy(
        model, 0.1, train_size=10, prior=GaussianPrior(precision=0.5), temperature=1.0, params=None,
        generator=seeded(), settings={},
    )  # fmt: skip
    model.weight.grad = torch.ones_like(model.weight)
    sampler.step()
    eta = normal_(torch.empty(SIZE), seeded())
    torch.testing.assert_close(model.weight.detach(), start * 0.5 - 10 + eta)


@pytest.mark.parametrize("own_noise", [True, False])
def test_blocks_take_the_random_numbers_of_the_loop(
    own_noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors go by themselves and small ones together: the numbers are still in the loop's order."""
    scalars = {"delta": 0.1, "gamma": 0.2, "tau": 0.5, "n": 50}
    sizes = [(7,), (400, 300), (30, 20), (50, 5), (400, 200), (2,)]

    def draw() -> Tensor:
        mu, s = [torch.zeros(size) for size in sizes], [torch.ones(size) for size in sizes]
        draws = [torch.empty(size) for size in sizes]
        eta_in = 0 if own_noise else None
        Workspace().apply(vogn_draw, [draws], [mu, s], seeded(), eta_in=eta_in, **scalars)
        return torch.cat([d.flatten() for d in draws])

    ours = draw()
    only_noise(monkeypatch)
    torch.testing.assert_close(draw(), ours, rtol=1e-5, atol=1e-6)


def test_means_and_stds_may_be_broadcast() -> None:
    x = torch.empty(SIZE)
    gaussians_([x], [torch.ones(1)], [torch.zeros(1)], seeded())
    assert torch.equal(x, torch.ones(SIZE))


def test_a_function_without_a_file_is_compiled_all_the_same() -> None:
    space: dict[str, Any] = {}
    exec("def double(x):\n    x[0] = 2 * x[0]", space)
    compiled = loops._compiled("void(float32[::1])")(space["double"])
    x = np.array([3.0], np.float32)
    compiled(x)
    assert x[0] == 6
