"""K-FAC and Noisy K-FAC against NumPy transcriptions, and their factors against sums over examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.core.noise import normals_
from torchbayes.curvature import Capture
from torchbayes.likelihood import Categorical
from torchbayes.models import lenet5
from torchbayes.optim.kfac import KFAC
from torchbayes.optim.noisy_kfac import NoisyKFAC, damped_inverses
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
    tau: float, refresh: int,
) -> np.ndarray:  # fmt: skip
    v, a, g, roots, size = np.zeros_like(w), None, None, None, 0.0
    delta_t = tau * delta / N
    for t, batch in enumerate(BATCHES):
        theta = w
        if roots is not None and noise is not None:
            theta = w + np.sqrt(tau / N) * roots[1] @ noise() @ roots[0].T
        inputs = np.hstack([X[batch], np.ones((M, 1))])
        errors = inputs @ theta.T - Y[batch]  # the gradient of one example's loss at the output
        new_a, new_g = inputs.T @ inputs / M, errors.T @ errors / M
        a = new_a if a is None else (1 - beta2) * a + beta2 * new_a
        g = new_g if g is None else (1 - beta2) * g + beta2 * new_g
        if t % refresh == 0 or np.trace(a) * np.trace(g) > 2 * size:
            size = np.trace(a) * np.trace(g)
            lam = delta_t + gamma
            pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
            inverses = [
                np.linalg.inv(a + pi * np.sqrt(lam) * np.eye(len(a))),
                np.linalg.inv(g + np.sqrt(lam) / pi * np.eye(len(g))),
            ]
            roots = [np.linalg.cholesky(i) for i in inverses]
        v = beta1 * v + errors.T @ inputs / M + delta_t * w
        w = w - lr * inverses[1] @ v @ inverses[0]
    return w


@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_five_steps(noisy: bool, refresh: int) -> None:
    net = layer()
    start = matrix(net)
    common = {
        "train_size": N, "prior": 2.0, "damping": 0.01, "betas": (0.8, 0.4),
        "refresh_every": refresh,
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
        tau=0.7 if noisy else 1.0, refresh=refresh,
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
    expected = np.kron(state["input_inverse"].numpy(), state["output_inverse"].numpy()) / N
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
    torch.testing.assert_close(sums.inputs / 5, a_expected)
    torch.testing.assert_close(sums.outputs * 25 / sums.rows, g_expected)
    # And their product is the curvature's scale: with one position it would be exact.
    assert sums.rows == 5 * positions


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
        expected = damped_inverses(state["inputs"], state["outputs"], 0.1 + 1 / N)
        return state["output_inverse"].clone(), *expected

    first, _, expected = inverted(1.0)
    torch.testing.assert_close(first, expected)
    for scale in (1.3, 0.1):  # 1.69 times the curvature, and less of it: no reason to invert
        kept, _, now = inverted(scale)
        assert torch.equal(kept, first)
        assert not torch.allclose(now, first)
    found, _, expected = inverted(1.5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["kfac", "noisy-kfac"])
def test_learns_one_batch_by_heart(name: str) -> None:
    """On LeNet-5 the curvature grows many times over in the first steps, between two refreshes."""
    torch.manual_seed(0)
    net, x, y = lenet5(), torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    plan = Plan(50_000, 1, 390, torch.Generator().manual_seed(0), lambda: net)
    method = METHODS[name](net, Categorical(), plan, lr=0.003)
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
    found, _ = damped_inverses(a, g, damping)
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
            damped_inverses(*pair, 0.01)
