"""The compiled loops against NumPy in double precision and against the same updates in torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbayes import kernels
from torchbayes.core.noise import gaussians_, normal_, normals_
from torchbayes.kernels import Loop, loops, threads
from torchbayes.optim import ATMC, IVON, PSGLD, SGHMC, SGLD, SGNHT, VOGN
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.sampler import Sampler
from torchbayes.prior import GaussianPrior, ScaleMixturePrior
from torchbayes.variational import MeanField

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


def sgld(theta: np.ndarray, g: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    force = 100.0 * g + 1.5 * theta
    return [theta - 1e-3 / 2 * force + np.sqrt(1e-3) * eta]


def psgld(theta: np.ndarray, v: np.ndarray, g: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    force = 100.0 * g + 1.5 * theta
    v = 0.9 * v + 0.1 * (force / 100) ** 2
    metric = 1 / (1e-3 + np.sqrt(v / (1 - 0.9**3)))
    return [theta - 1e-4 / 2 * metric * force + np.sqrt(1e-4 * metric) * eta, v]


def sghmc(theta: np.ndarray, p: np.ndarray, g: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    h, m, d = 1e-2, 9.0, 8.0
    p = (1 - h * d) * p - h * (100.0 * g + 1.5 * theta) + np.sqrt(2 * h * d * m) * eta
    return [theta + h * p / m, p]


def draw(x: np.ndarray, mu: np.ndarray, s: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    return [mu + 0.1 * eta / np.sqrt(s + 0.3)]


def vogn(
    mu: np.ndarray, m: np.ndarray, s: np.ndarray, g: np.ndarray, h: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    m = 0.9 * m + g + 0.02 * mu  # lines 17 to 19
    s = (1 - 0.05) * s + 0.05 * 3 * h
    return [mu - 0.1 * m / (s + 0.02 + 0.3), m, s]


def ivon(
    mu: np.ndarray, m: np.ndarray, h: np.ndarray, g: np.ndarray, theta: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    lam, delta, beta1, beta2, t, alpha, h0, xi = 5.0, 0.02, 0.9, 0.99, 3, 0.1, 0.4, 2.0
    estimate = lam * g * (theta - mu) * (h + delta)
    m = beta1 * m + (1 - beta1) * g
    new = beta2 * h + (1 - beta2) * estimate
    new = new + 0.5 * (1 - beta2) ** 2 * (h - estimate) ** 2 / (h + delta)
    step = (m / (1 - beta1**t) + delta * mu) / (new + delta)
    return [mu - alpha * (h0 + delta) * np.clip(step, -xi, xi), m, new]


def softplus(
    _std: np.ndarray, _slope: np.ndarray, rho: np.ndarray, _eta: np.ndarray
) -> list[np.ndarray]:
    rho = np.clip(rho, -87.0, 79.0)
    return [np.logaddexp(0, rho), 1 / (1 + np.exp(-rho))]


def bbb(*columns: np.ndarray) -> list[np.ndarray]:
    *_, mean, rho, eta = columns
    std, slope = softplus(rho, rho, rho, eta)
    return [mean + std * eta, eta, std, slope]


def bbb_gradients(*columns: np.ndarray) -> list[np.ndarray]:
    *_, g, noise, std, slope, mean, _eta = columns
    # The KL term's weight is 0.1, the prior N(0.2, 1/1.5).
    to_mean = g + 0.1 * 1.5 * (mean - 0.2)
    return [to_mean, slope * (g * noise + 0.1 * (1.5 * std - 1 / std))]


def mixture(_pull: np.ndarray, w: np.ndarray, _eta: np.ndarray) -> list[np.ndarray]:
    """−∂ log(0.25 N(w; 0, 1) + 0.75 N(w; 0, 0.1²))."""
    wide, narrow = 0.25 * np.exp(-(w**2) / 2), 7.5 * np.exp(-(w**2) / 0.02)
    return [(wide * w + narrow * w / 0.01) / (wide + narrow)]


MIXTURE = (1.0, 99.0, float(np.log(0.75 / 0.25) + np.log(10)), -87.0, 79.0)


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


def thermostat_numbers(d: float, h: float, c: float) -> tuple[float, ...]:
    return h, d, (9.0 * c) ** -2, h * 100, h * 1.5, 2 * 9.0 * h, h / 9.0


UPDATES: list[tuple[Loop, int, Callable[..., list[np.ndarray]], tuple[float, ...]]] = [
    (Loop.SGLD, 2, sgld, (1 - 1e-3 / 2 * 1.5, 1e-3 / 2 * 100, 1e-3**0.5)),
    (
        Loop.PSGLD, 3, psgld,
        (100, 1.5, 0.9, 0.1 / 100**2, 1 / (1 - 0.9**3), 1e-3, 1e-4 / 2, 1e-4**0.5),
    ),
    (Loop.SGHMC, 3, sghmc, (1 - 8e-2, 1, 1.5e-2, (2 * 8e-2 * 9) ** 0.5, 1e-2 / 9)),
    (Loop.SOFTPLUS, 3, softplus, (-87.0, 79.0)),
    (Loop.BBB, 6, bbb, (-87.0, 79.0)),
    (Loop.BBB_GRADIENTS, 7, bbb_gradients, (0.1, 0.15, 0.03)),
    (Loop.MIXTURE, 2, mixture, MIXTURE),
    (Loop.DRAW, 3, draw, (0.3, 0.1)),
    (Loop.VOGN, 5, vogn, (0.1, 0.9, 0.95, 0.15, 0.02, 0.32)),
    (
        Loop.IVON, 5, ivon,
        (0.1, 0.01, 5.0, 0.02, 0.02 * (1 - 0.9**3), 1 / (1 - 0.9**3), 0.1 * 0.42, 2.0),
    ),
    *[
        (loop, 4, thermostat(loop == Loop.ATMC, d, h, c), thermostat_numbers(d, h, c))
        for loop in (Loop.SGNHT, Loop.ATMC)
        for d, h, c in [(8.0, 1e-2, np.inf), (8.0, 1e-2, 0.5), (1e-3, 1e-3, 2.0), (500.0, 0.1, 1.0)]
    ],
]  # fmt: skip


@pytest.mark.parametrize(("loop", "count", "update", "numbers"), UPDATES)
def test_every_loop_is_its_formula(
    loop: Loop, count: int, update: Callable[..., list[np.ndarray]], numbers: tuple[float, ...]
) -> None:
    given = columns(count)
    if loop == Loop.PSGLD:
        given[1].abs_()
    if loop in (Loop.DRAW, Loop.VOGN, Loop.IVON):
        given[2].abs_()  # the curvature
    if loop == Loop.BBB_GRADIENTS:
        given[4].abs_().add_(0.01)  # σ
    if loop in (Loop.SOFTPLUS, Loop.BBB):
        given[-1].mul_(100)  # a standard deviation may be as small as float32 can have it, or large
    eta = normal_(torch.empty(SIZE), seeded(5)).double().numpy()
    truth = update(*(column.double().numpy() for column in given), eta)
    before = given[-1].clone()
    kernels.run(loop, [[column] for column in given], numbers, seeded(5))
    for ours, right in zip(given, truth, strict=False):
        if loop == Loop.SOFTPLUS:
            np.testing.assert_allclose(ours.numpy(), right, rtol=3e-6)
        np.testing.assert_allclose(ours.numpy(), right, rtol=2e-5, atol=2e-6 * np.abs(right).max())
    assert torch.equal(given[-1], before)  # the gradient


def test_the_sums_of_a_kl_term() -> None:
    given = columns(6)
    given[5].mul_(10).sub_(5)
    mean, rho = (column.double().numpy() for column in given[4:])
    std = np.logaddexp(0, rho)
    sums = kernels.run(Loop.BBB, [[column] for column in given], (-87.0, 79.0), seeded())
    eta = normal_(torch.empty(SIZE), seeded()).double().numpy()
    truth = [(std**2).sum(), (mean**2).sum(), np.log(std).sum(), (eta**2).sum()]
    np.testing.assert_allclose(sums, truth, rtol=1e-6)


def test_the_sums_of_a_mixture() -> None:
    given = columns(2)
    w = given[1].double().numpy()
    sums = kernels.run(Loop.MIXTURE, [[column] for column in given], MIXTURE)
    u = MIXTURE[2] - 0.5 * 99 * w**2
    np.testing.assert_allclose(sums[:2], [(w**2).sum(), np.logaddexp(0, u).sum()], rtol=1e-6)


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

    ran: list[Loop] = []
    run = kernels.run

    def watched(loop: Loop, *rest: Any) -> Any:
        ran.append(loop)
        return run(loop, *rest)

    monkeypatch.setattr(kernels, "run", watched)
    ours = gradients()
    middle = [] if prior else [Loop.MIXTURE]
    assert ran == [Loop.BBB, *middle, Loop.BBB_GRADIENTS]
    fits = kernels.fits
    monkeypatch.setattr(kernels, "fits", lambda columns, g: len(columns) == 1 and fits(columns, g))
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)
    assert ran[len(middle) + 2 :] == [Loop.NORMAL]


@pytest.mark.parametrize("loop", [Loop.SGNHT, Loop.ATMC])
def test_no_friction_and_no_thermostat_do_not_overflow(loop: Loop) -> None:
    given = [torch.ones(SIZE), torch.zeros(SIZE), torch.zeros(SIZE), torch.ones(SIZE)]
    kernels.run(loop, [[c] for c in given], (1e-3, 0.0, 1.0, 0.1, 0.0, 2e-3, 1e-3), seeded())
    # Without friction the momentum is the force over a step.
    np.testing.assert_allclose(given[1], -0.1, rtol=1e-6)


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
    (SGLD, {}),
    (PSGLD, {}),
    (SGHMC, {}),
    (SGNHT, {}),
    (SGNHT, {"max_step": 0.01}),
    (ATMC, {}),
    (ATMC, {"max_step": np.inf}),
    (ATMC, {"prior": GaussianPrior(mean=0.1, precision=2.0)}),
]


@pytest.mark.parametrize(("make", "options"), SAMPLERS)
def test_a_chain_is_the_one_that_torchs_operations_give(
    make: Callable[..., Sampler], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Loop] = []
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda loop, *rest: (ran.append(loop), run(loop, *rest)))
    ours, compiled = chain(make, **options)
    assert len(ran) == 10
    assert Loop.NORMAL not in ran
    monkeypatch.setattr(make, "loop", lambda *_: None)
    others, eager = chain(make, **options)
    assert ran[10:] == [Loop.NORMAL] * 10
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

    ran: list[Loop] = []
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda loop, *rest: (ran.append(loop), run(loop, *rest)))
    ours = train()
    assert set(ran) == {Loop.DRAW, Loop.VOGN if make is VOGN else Loop.IVON}
    fits = kernels.fits
    monkeypatch.setattr(kernels, "fits", lambda columns, g: len(columns) == 1 and fits(columns, g))
    for a, b in zip(ours, train(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert Loop.NORMAL in ran


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("openmp", [True, False])
def test_threads_do_not_change_a_chain(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr("torchbayes.kernels.tensors._CHUNKS_PER_THREAD", 1)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        given = [column.clone() for column in columns(4)]
        kernels.run(Loop.ATMC, [[c] for c in given], thermostat_numbers(8.0, 1e-2, 0.5), seeded())
        results.append(given)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("openmp", [True, False])
def test_every_part_is_done_once_and_errors_are_raised(
    openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    torch.set_num_threads(3)
    done: list[int] = []
    threads.share(lambda first, last: done.extend(range(first, last)), 100, 10)
    assert sorted(done) == list(range(100))

    def fail(first: int, last: int) -> None:
        raise IndexError(f"{first} to {last}")  # not to be taken for the end of the work

    with pytest.raises(IndexError, match="0 to"):
        threads.share(fail, 100, 10)


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
    assert kernels.fits([[large]], None)
    assert kernels.fits([[nn.Parameter(large)]], seeded())
    assert not kernels.fits([[torch.zeros(100)]], None)
    assert not kernels.fits([[large.double()]], None)
    assert not kernels.fits([[large.to("meta")]], None)
    assert not kernels.fits([[torch.zeros(200, 300).t()]], None)
    assert not kernels.fits([[large], [large.double()]], None)
    assert not kernels.fits([[large], [torch.ones(1)]], None)


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
