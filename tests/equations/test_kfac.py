"""K-FAC and Noisy K-FAC against NumPy transcriptions, and their factors against sums over examples."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.core.noise import normals_
from torchbayes.curvature import Capture
from torchbayes.curvature.factors import FactorSums
from torchbayes.likelihood import Categorical
from torchbayes.models import lenet5
from torchbayes.optim.kfac import KFAC
from torchbayes.optim.noisy_kfac import NoisyKFAC, damped_roots
from torchbayes.train.method import Plan
from torchbayes.train.registry import METHODS

N, M = 50, 10
RNG = np.random.default_rng(1)
X = RNG.standard_normal((N, 4))
Y = X @ RNG.standard_normal((4, 3)) + 0.2 * RNG.standard_normal((N, 3))
BATCHES = [np.arange(M * i, M * i + M) % N for i in range(5)]


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def matrix(net: nn.Linear) -> np.ndarray:
    return np.hstack([net.weight.detach().numpy(), net.bias.detach().numpy()[:, None]])


def loss_of(net: nn.Module, batch: np.ndarray) -> torch.Tensor:
    x, y = torch.from_numpy(X[batch]), torch.from_numpy(Y[batch])
    return (0.5 * (net(x) - y) ** 2).sum() / len(batch)


def transcription(
    w: np.ndarray, noise, *, lr: float, beta1: float, beta2: float, delta: float, gamma: float,
    tau: float, refresh: int, every: int = 1,
) -> np.ndarray:  # fmt: skip
    v, a, g, roots, size = np.zeros_like(w), None, None, None, 0.0
    due, gap, before = 0, 1, 0.0
    delta_t = tau * delta / N
    for t, batch in enumerate(BATCHES):
        theta = w
        if roots is not None and noise is not None:
            theta = w + np.sqrt(tau / N) * roots[1] @ noise() @ roots[0].T
        inputs = np.hstack([X[batch], np.ones((M, 1))])
        errors = inputs @ theta.T - Y[batch]  # the gradient of one example's loss at the output
        new_a, new_g = inputs.T @ inputs / M, errors.T @ errors / M
        if t >= due:
            a = new_a if a is None else (1 - beta2) * a + beta2 * new_a
            g = new_g if g is None else (1 - beta2) * g + beta2 * new_g
            now = np.trace(a) * np.trace(g)
            gap = 1 if now > (1 + beta2) ** 2 * before else min(2 * gap, every)
            due, before = t + gap, now
        if t % refresh == 0 or np.trace(a) * np.trace(g) > 2 * size:
            size = np.trace(a) * np.trace(g)
            lam = delta_t + gamma
            pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
            damped = [
                a + pi * np.sqrt(lam) * np.eye(len(a)),
                g + np.sqrt(lam) / pi * np.eye(len(g)),
            ]
            inverses = [np.linalg.inv(d) for d in damped]
            roots = [np.linalg.inv(np.linalg.cholesky(d).T) for d in damped]
        v = beta1 * v + errors.T @ inputs / M + delta_t * w
        w = w - lr * inverses[1] @ v @ inverses[0]
    return w


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_five_steps(noisy: bool, refresh: int, every: int) -> None:
    net = layer()
    start = matrix(net)
    common = {
        "train_size": N, "prior": 2.0, "damping": 0.01, "betas": (0.8, 0.4),
        "refresh_every": refresh, "statistics_every": every,
    }  # fmt: skip
    if noisy:
        generator = torch.Generator().manual_seed(3)
        common |= {"temperature": 0.7, "temperature_steps": 0, "generator": generator}
        optimizer = NoisyKFAC(net, 0.1, **common)
    else:
        optimizer = KFAC(net, 0.1, **common)
    again = torch.Generator().manual_seed(3)

    def noise() -> np.ndarray:
        parts = [torch.empty(3, 4, dtype=torch.float64), torch.empty(3, dtype=torch.float64)]
        normals_(parts, again)
        return np.hstack([parts[0].numpy(), parts[1].numpy()[:, None]])

    expected = transcription(
        start, noise if noisy else None, lr=0.1, beta1=0.8, beta2=0.4, delta=2.0, gamma=0.01,
        tau=0.7 if noisy else 1.0, refresh=refresh, every=every,
    )  # fmt: skip
    for batch in BATCHES:

        def closure(batch: np.ndarray = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    np.testing.assert_allclose(matrix(net), expected, rtol=1e-8)


def test_a_draw_of_the_posterior_has_the_factors_covariance() -> None:
    """Cov(vec W) = (τ/N) A⁻¹ ⊗ G⁻¹ of the damped factors, with vec stacking columns."""
    net = layer()
    optimizer = NoisyKFAC(net, 0.0, train_size=N, damping=0.1, temperature_steps=0)
    with optimizer.sampled():
        loss_of(net, BATCHES[0]).backward()
    optimizer.step()
    state = optimizer.state[net.weight]
    a, g = damped_roots(state["inputs"], state["outputs"], 0.1 + 1 / N)
    expected = np.kron(np.linalg.inv((a.mT @ a).numpy()), np.linalg.inv((g.mT @ g).numpy())) / N
    count = 4_000
    generator = torch.Generator().manual_seed(0)
    posterior = optimizer.posterior()
    draws = np.empty((count, 15))
    for i in range(count):
        draw = posterior.sample(generator)
        whole = np.hstack([draw["weight"].numpy(), draw["bias"].numpy()[:, None]])
        draws[i] = whole.ravel(order="F")
    found = np.cov(draws.T)
    var = np.diag(expected)
    error = np.sqrt((np.outer(var, var) + expected**2) / count)
    assert (np.abs(found - expected) / error).max() < 5
    stds = posterior.std()
    marginal = np.hstack([stds["weight"].numpy(), stds["bias"].numpy()[:, None]]).ravel(order="F")
    np.testing.assert_allclose(marginal, np.sqrt(var), rtol=1e-10)


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
        (nn.Conv2d(2, 3, (3, 2), padding=1, dilation=(1, 2)), (2, 5, 6)),
        (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), bias=False), (2, 3, 4, 3)),
    ],
)
def test_convolution_factors_are_second_moments_of_patches(
    conv: nn.Module, shape: tuple[int, ...]
) -> None:
    """A = E[Σₜ a aᵀ], G = E[(1/T) Σₜ g gᵀ], patch by patch."""
    conv = conv.double()
    torch.manual_seed(0)
    x = torch.randn(5, *shape, dtype=torch.float64)
    joint = "bias" if conv.bias is not None else None
    capture = Capture(conv, dict(conv.named_parameters()), {"weight": joint})
    with capture.block():
        conv(x).tanh().flatten(1).sum(1).mean().backward()
    sums = capture.factors[id(conv.weight)]
    # The patches as what a convolution with one-hot kernels gives.
    size = conv.weight[0].numel()
    one_hot = torch.eye(size, dtype=torch.float64).view(size, *conv.weight.shape[1:])
    kind = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    patches = kind(x, one_hot, None, conv.stride, conv.padding, conv.dilation).flatten(2)
    if joint:
        patches = torch.cat([patches, torch.ones_like(patches[:, :1])], 1)
    positions = patches.shape[2]
    out = conv(x)
    g = (1 - out.tanh() ** 2).detach().flatten(2)
    a_expected = torch.einsum("bit,bjt->ij", patches, patches) / 5
    g_expected = torch.einsum("bit,bjt->ij", g, g) / (5 * positions)
    torch.testing.assert_close((sums.inputs / 5).tril(), a_expected.tril())
    torch.testing.assert_close((sums.outputs * 25 / sums.rows).tril(), g_expected.tril())
    # And their product is the curvature's scale: with one position it would be exact.
    assert sums.rows == 5 * positions


@pytest.mark.parametrize("bias", [False, True])
def test_factors_larger_than_a_block_are_lower_triangles(bias: bool) -> None:
    """Eight blocks of columns for 1,300 inputs, two for 150 outputs; two uses, twice from the start."""
    torch.manual_seed(0)
    net = nn.Linear(1_300, 150, bias=bias)
    sums = FactorSums(net.weight, net.bias)
    for _ in range(2):
        sums.restart()
        uses = [(torch.randn(3, 2, 1_300), torch.randn(3, 2, 150)) for _ in range(2)]
        for x, g in uses:
            sums.add(x, g)
        x, g = (torch.cat(parts).flatten(0, 1).numpy() for parts in zip(*uses, strict=True))
        if bias:
            x = np.hstack([x, np.ones((len(x), 1), np.float32)])
        for found, rows in ((sums.inputs, x), (sums.outputs, g)):
            expected = np.tril(rows.T @ rows)
            np.testing.assert_allclose(np.tril(found.numpy()), expected, rtol=1e-4, atol=1e-4)
            assert torch.isfinite(found).all()


def test_grown_curvature_is_inverted_at_once() -> None:
    """The inverses are those of the last step at which the curvature's trace had doubled."""
    net = layer()
    optimizer = KFAC(net, 0.0, train_size=N, damping=0.1, betas=(0.0, 1.0), refresh_every=100)

    def inverted(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with optimizer.sampled():
            optimizer.zero_grad()
            (scale * loss_of(net, BATCHES[0])).backward()
        optimizer.step()
        state = optimizer.state[net.weight]
        expected = damped_roots(state["inputs"], state["outputs"], 0.1 + 1 / N)
        return state["output_cholesky"].clone(), *expected

    first, _, expected = inverted(1.0)
    torch.testing.assert_close(first, expected)
    for scale in (1.3, 0.1):  # 1.69 times the curvature, and less of it: no reason to invert
        kept, _, now = inverted(scale)
        assert torch.equal(kept, first)
        assert not torch.allclose(now, first)
    found, _, expected = inverted(1.5)
    torch.testing.assert_close(found, expected)


def test_second_moments_are_gathered_at_a_gap_that_ends_when_the_curvature_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps 0, 1, 3 and 7, then every fourth; every one after a batch of five times the curvature."""
    added: list[Tensor] = []
    monkeypatch.setattr(FactorSums, "add", _noting(added, FactorSums.add))

    def start() -> tuple[nn.Linear, KFAC]:
        net = layer()
        options = {"betas": (0.0, 0.1), "refresh_every": 100, "statistics_every": 4}
        return net, KFAC(net, 0.0, train_size=N, damping=0.1, **options)

    def gathered(net: nn.Linear, optimizer: KFAC, steps: range) -> list[int]:
        found = []
        for step in steps:
            added.clear()
            with optimizer.sampled():
                optimizer.zero_grad()
                (loss_of(net, BATCHES[0]) * (1.0 if step < 15 else 5**0.5)).backward()
            optimizer.step()
            found += [step] * len(added)
        return found

    net, optimizer = start()
    assert gathered(net, optimizer, range(13)) == [0, 1, 3, 7, 11]
    again, resumed = start()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in ((net, optimizer), (again, resumed)):
        # The average is multiplied by 1.4, 1.26 and 1.18, and 1.21 is the limit.
        assert gathered(one, other, range(13, 30)) == [15, 16, 17, 19, 23, 27]


def _noting(added: list[Tensor], add: Callable[..., None]) -> Callable[..., None]:
    def noted(sums: FactorSums, x: Tensor, g: Tensor) -> None:
        added.append(x)
        add(sums, x, g)

    return noted


@pytest.mark.parametrize("name", ["kfac", "noisy-kfac"])
@pytest.mark.parametrize("every", [1, 10])
def test_learns_one_batch_by_heart(name: str, every: int) -> None:
    """On LeNet-5 the curvature grows many times over in the first steps, between two refreshes."""
    torch.manual_seed(0)
    net, x, y = lenet5(), torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    plan = Plan(50_000, 1, 390, torch.Generator().manual_seed(0), lambda: net)
    method = METHODS[name](net, Categorical(), plan, lr=0.003, statistics_every=every)
    method.begin_epoch(0)
    losses = []

    def closure() -> torch.Tensor:
        method.optimizer.zero_grad()
        loss = method.loss(x, y)
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    for _ in range(32):
        method.step(closure)
    assert max(losses) < 1.2 * losses[0]
    assert losses[-1] < 0.1


@pytest.mark.parametrize("size", [100, 50_000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_without_a_rate_steps_are_of_one_size_whatever_the_scale_of_the_loss(
    size: int, scale: float
) -> None:
    """Root mean squares from 0.0005 to 0.01 times √(8/f); the tenth of 200 steps is still in the rise."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 3), torch.randn(64, 32)
    optimizer = KFAC(model, train_size=size, steps=200)
    sizes = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = scale * F.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        return loss

    for _ in range(10):
        before = model.weight.detach().clone()
        optimizer.step(closure)
        sizes.append(float((model.weight.detach() - before).square().mean().sqrt()))
    most = 0.01 * (8 / 32) ** 0.5 * 10 / 11
    assert 0.049 * most < sizes[-1] < 1.01 * most
    given = METHODS["kfac"](
        nn.Linear(4, 3),
        Categorical(),
        Plan(size, 1, 1, torch.Generator(), lambda: nn.Linear(4, 3)),
        lr=0.1,
    )
    assert given.optimizer.param_groups[0]["lr"] == 0.1


def test_rounding_below_zero_is_no_failure() -> None:
    """Sums in single precision have eigenvalues below 0 that a small damping does not lift."""
    generator = torch.Generator().manual_seed(0)
    rows = 1e3 * torch.randn(8, 60, generator=generator)  # 52 of 60 eigenvalues are 0
    a, g = rows.t() @ rows / 8, torch.eye(3)
    pi = float((a.diagonal().double().mean() / 1.0).sqrt())
    damping = 1e-14
    amount = pi * damping**0.5
    exact = rows.double().t() @ rows.double() / 8
    assert float(torch.linalg.eigvalsh(a.double())[0]) < -amount  # else this would test nothing
    root = damped_roots(a, g, damping)[0].double()
    found = torch.cholesky_inverse(root, upper=True)
    torch.linalg.cholesky(found)
    largest = float(torch.linalg.eigvalsh(exact)[-1])
    assert float(torch.linalg.eigvalsh(found)[-1]) <= 1.001 / (
        torch.finfo(torch.float32).eps * largest
    )
    # Where there is signal the inverse is right.
    direction = torch.linalg.eigh(exact).eigenvectors[:, -1]
    torch.testing.assert_close(
        float(direction @ found @ direction), 1 / (largest + amount), rtol=1e-3, atol=0.0
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (-9.0, "second moment")],
)
def test_bad_factors_are_named(value: float, message: str) -> None:
    a = torch.eye(4)
    a[1, 1] = value
    for pair in ((a, torch.eye(2)), (torch.eye(2), a)):
        with pytest.raises(ValueError, match=f"a Kronecker factor of size 4 .*{message}"):
            damped_roots(*pair, 0.01)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_those_of_the_damped_factors(dtype: torch.dtype, scale: float) -> None:
    """Single precision is used where the damping is large enough for it, double elsewhere."""
    torch.manual_seed(0)
    rows, columns = torch.randn(20, 40, dtype=dtype), scale * torch.randn(20, 7, dtype=dtype)
    a, g = rows.t() @ rows / 20, columns.t() @ columns / 20
    mean = [float(np.trace(f.double().numpy())) / len(f) for f in (a, g)]
    pi = np.sqrt(mean[0] / mean[1])
    upper = [f + f.triu(1) for f in (a, g)]  # what is above the diagonal is not read
    for factor, share, root in zip(
        (a, g), (pi * 0.1, 0.1 / pi), damped_roots(*upper, 0.01), strict=True
    ):
        damped = factor.double().numpy() + share * np.eye(len(factor))
        assert root.dtype == dtype
        assert torch.equal(root, root.triu())
        expected, found = (
            np.linalg.inv(damped),
            np.linalg.inv((root.mT.double() @ root.double()).numpy()),
        )
        tolerance = 1e-10 if dtype == torch.float64 else 3e-3
        assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


def test_layers_take_turns_and_a_run_continues_in_the_middle_of_them() -> None:
    """The factors of one layer are decomposed at a time, after the first step; resumed bit for bit."""

    def start() -> tuple[nn.Module, NoisyKFAC]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        generator = torch.Generator().manual_seed(1)
        options = {"train_size": N, "refresh_every": 4, "damping": 1.0, "generator": generator}
        return net.double(), NoisyKFAC(net, 1e-3, **options)

    def steps(net: nn.Module, optimizer: NoisyKFAC, first: int, last: int) -> list[list[int]]:
        renewed = []
        for batch in (BATCHES[i % 5] for i in range(first, last)):
            weights = [net[0].weight, net[2].weight, net[4].weight]
            before = [optimizer.state[w].get("input_cholesky") for w in weights]
            with optimizer.sampled():
                optimizer.zero_grad()
                loss_of(net, batch).backward()
            optimizer.step()
            after = [optimizer.state[w]["input_cholesky"] for w in weights]
            renewed.append([i for i in range(3) if after[i] is not before[i]])
        return renewed

    net, optimizer = start()
    assert steps(net, optimizer, 0, 6) == [[0, 1, 2], [0], [2], [], [1], [0]]
    again, resumed = start()
    again.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else they would share memory
    assert steps(net, optimizer, 6, 12) == steps(again, resumed, 6, 12)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
