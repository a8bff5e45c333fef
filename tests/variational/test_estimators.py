"""Estimators: the shared draw's moments, less variance, and the ordinary sample wherever they cannot help."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.variational import (
    MeanField,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.estimators import Estimator

LOW_VARIANCE = [flipout, local_reparameterisation]
LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear, no bias": (lambda: nn.Linear(6, 4, bias=False), (6,)),
    "linear on sequences": (lambda: nn.Linear(6, 4), (5, 6)),
    "conv1d": (
        lambda: nn.Conv1d(4, 6, 3, padding="same", groups=2, padding_mode="reflect"),
        (4, 7),
    ),
    "conv2d": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, padding_mode="circular"),
        (4, 6, 6),
    ),
    "conv2d valid": (lambda: nn.Conv2d(4, 6, (3, 1), padding="valid"), (4, 4, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 3)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1, dilation=2),
        (2, 3, 3),
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 2, 2)),
}


def wrap(model: nn.Module, estimator: Estimator, std: float = 0.3, seed: int = 0) -> MeanField:
    generator = torch.Generator().manual_seed(seed)
    return MeanField(model, estimator=estimator, init_std=std, generator=generator)


def off_in_standard_errors(per_call: Tensor, exact: Tensor) -> float:
    """How far the mean of independent calls' estimates is from the truth, at worst."""
    error = per_call.std(0) / math.sqrt(len(per_call))
    return float(((per_call.mean(0) - exact).abs() / error.clamp_min(1e-12)).max())


def exact_covariance(model: nn.Module, x: Tensor, std: float) -> Tensor:
    """Of the outputs of a layer that is linear in its weights, for one example."""
    names, weights = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)

    def outputs(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(
            model, dict(zip(names, weights, strict=True)), x
        ).flatten()

    jacobians = torch.func.jacrev(outputs, tuple(range(len(weights))))(*weights)
    return sum(j.flatten(1) @ j.flatten(1).T for j in jacobians) * std**2


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_output_moments_are_the_shared_draws(layer: str, estimator: Estimator) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    model = make().double()
    x = torch.randn(1, *shape).double()
    net = wrap(model, estimator, std=0.3)
    means, products = [], []
    with torch.no_grad():
        mean = model(x).flatten()
        for _ in range(150):
            off = net(x.expand(64, *shape)).flatten(1) - mean
            means.append(off.mean(0))
            products.append(off.T @ off / 64)
    assert dict(net.rule_hits) == {"weight": 1}
    exact = exact_covariance(model, x, 0.3)
    assert off_in_standard_errors(torch.stack(means), torch.zeros_like(mean)) < 5
    # Flipout has the joint distribution of an example's outputs, the other that of each output alone.
    kept = torch.ones_like(exact, dtype=torch.bool)
    if estimator is local_reparameterisation:
        kept = torch.eye(len(exact), dtype=torch.bool)
    assert off_in_standard_errors(torch.stack(products)[:, kept], exact[kept]) < 5.5


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_examples_have_noise_of_their_own(layer: str, estimator: Estimator) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    net = wrap(make().double(), estimator, std=0.3)
    x = torch.randn(1, *shape).double()
    with torch.no_grad():
        mean = net.model(x).flatten()
        off = torch.stack([net(x.expand(2, *shape)).flatten(1) - mean for _ in range(100)])
    across = off[:, 0] * off[:, 1]
    assert off_in_standard_errors(across, torch.zeros_like(mean)) < 4.5


@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_gradient_variance_at_batch_128(estimator: Estimator) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(128, 64), torch.randn(128, 10)  # as pixels or activations are: not negative
    variances = []
    for kind in (shared_draw, estimator):
        net = wrap(nn.Linear(64, 10), kind, std=0.1)
        grads = []
        for _ in range(150):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
            grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        variances.append(torch.stack(grads).var(0).view(2, -1).mean(1))  # of μ, of ρ
    assert (variances[1] < 0.1 * variances[0]).all()


@pytest.mark.parametrize("estimator", [shared_draw, *LOW_VARIANCE])
def test_gradients_are_unbiased(estimator: Estimator) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    net = wrap(nn.Linear(3, 2), estimator)
    grads = []
    for _ in range(300):
        net.zero_grad()
        F.mse_loss(net(x), y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    # E (x(μ + σε) − y)² = (xμ − y)² + x²σ²
    variance = F.linear(x.square(), *(F.softplus(r).square() for r in net.rho.parameters()))
    expected_loss = F.mse_loss(net.model(x), y) + variance.mean()
    exact = torch.autograd.grad(expected_loss, list(net.parameters()))
    flat = torch.cat([grad.flatten() for grad in exact])
    assert off_in_standard_errors(torch.stack(grads), flat) < 4.5


class Mixed(nn.Module):
    """Layers that the rules know, and uses of weights that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.hidden = nn.Linear(6, 6)
        self.free = nn.Parameter(torch.randn(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lstm(self.embedding(tokens))[0]
        x = self.attention(x, x, x)[0]
        flat = self.hidden(x.reshape(-1, 6)).view_as(x)  # examples and positions in one dimension
        return (self.hidden(x) + flat) * self.free


@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_other_uses_see_the_ordinary_sample(estimator: Estimator) -> None:
    torch.manual_seed(0)
    net = wrap(Mixed(), estimator, std=0.1)
    net(torch.randint(7, (3, 4))).sum().backward()
    expected = {"hidden.weight": 1 if estimator is flipout else 2}
    assert dict(net.rule_hits) == expected
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_weight_used_twice_has_the_same_signs_both_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x)

    net = wrap(Twice(), flipout)
    assert net(torch.randn(4, 5)).abs().max() == 0
    assert net.rule_hits == {"layer.weight": 2}


@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_a_notice_where_there_is_no_layer_to_help(estimator: Estimator) -> None:
    net = wrap(nn.LSTM(3, 2), estimator)
    with pytest.warns(UserWarning, match=f"{estimator.__name__} found no linear or convolution"):
        net(torch.randn(4, 2, 3))
    net(torch.randn(4, 2, 3))  # said once
    assert not net.rule_hits


def test_dead_inputs_give_no_nan() -> None:
    net = wrap(nn.Linear(3, 2, bias=False), local_reparameterisation)
    out = net(torch.zeros(4, 3))
    out.sum().backward()
    assert out.abs().max() == 0
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("estimator", LOW_VARIANCE)
def test_keyword_arguments_and_unbatched_inputs(estimator: Estimator) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, 3))
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(weight=self.weight, input=x, bias=self.bias, padding=1)

    net = wrap(Own(), estimator)
    assert net(torch.randn(2, 4, 5)).shape == (2, 6, 5)
    assert net.rule_hits == {"weight": 1}
    with pytest.warns(UserWarning, match="found no"):
        assert net(torch.randn(4, 5)).shape == (6, 5)


def test_half_precision_forward_pass() -> None:
    for estimator in (shared_draw, *LOW_VARIANCE):
        net = wrap(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), estimator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(8, 6)).float().square().mean() + net.kl() / 10
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
