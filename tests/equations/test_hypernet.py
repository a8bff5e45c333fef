"""A hypernetwork's weights, gradients and SGD step against a literal NumPy transcription."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.models import wide_resnet
from torchbayes.variational.hypernet_sgd import rank_one_step_


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parts(net: tb.Hypernet, name: str) -> tuple[np.ndarray, np.ndarray]:
    first = net.first.get_parameter(name).detach().numpy()
    second = net.second.get_parameter(name).detach().numpy()
    return first, second.reshape(len(second), -1)


@pytest.fixture
def net() -> tb.Hypernet:
    torch.manual_seed(0)
    return tb.Hypernet(wide_resnet(10, 1).double(), latent_dim=5, hidden_dim=7, generator=seeded(1))


def test_generated_weights_are_the_formula(net: tb.Hypernet) -> None:
    latents = net.latents()
    assert list(latents) == ["all"]
    weights = net.generate(latents)
    z = latents["all"].numpy()
    for name, weight in weights.items():
        first, second = parts(net, name)
        expected = np.maximum(first @ z, 0) @ second
        np.testing.assert_allclose(
            weight.detach().numpy().reshape(-1), expected, rtol=1e-12, atol=1e-15
        )


def test_gradients_are_outer_products(net: tb.Hypernet) -> None:
    latents = net.latents()
    weights = net.generate(latents)
    generator = seeded(2)
    gradients = {
        n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()
    }
    sum((weights[name] * gradients[name]).sum() for name in weights).backward()
    z = latents["all"].numpy()
    for name in weights:
        first, second = parts(net, name)
        g = gradients[name].numpy().reshape(-1)
        a = np.maximum(first @ z, 0)
        got = net.second.get_parameter(name).grad.numpy().reshape(len(a), -1)
        np.testing.assert_allclose(got, np.outer(a, g), rtol=1e-12)
        back = (second @ g) * (first @ z > 0)
        np.testing.assert_allclose(
            net.first.get_parameter(name).grad.numpy(), np.outer(back, z), rtol=1e-9
        )


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.02, torch.tensor(0.02).double()], ids=["number", "tensor"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [3, 8, 20, 50, 80])
def test_rank_one_step_is_sgd_with_momentum(
    size: int, nesterov: bool, decay: float | torch.Tensor, maximize: bool
) -> None:
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(4, 20)), rng.normal(size=(4, 20))
    g, a = rng.normal(size=20), np.maximum(rng.normal(size=4), 0)
    lr, mu = 0.1, 0.9
    weight, momentum = torch.tensor(w), torch.tensor(v)
    settings = {"weight_decay": decay, "momentum": mu, "lr": lr, "dampening": 0.0}
    back = rank_one_step_(
        weight, momentum, torch.tensor(g), torch.tensor(a), torch.empty(size).double(),
        settings | {"nesterov": nesterov, "maximize": maximize, "is_first_step": False},
    )  # fmt: skip
    np.testing.assert_allclose(back.numpy(), w @ g, rtol=1e-12)
    d = (-1 if maximize else 1) * np.outer(a, g) + float(decay) * w
    v = mu * v + d
    w = w - lr * (d + mu * v if nesterov else v)
    np.testing.assert_allclose(momentum.numpy(), v, rtol=1e-12)
    np.testing.assert_allclose(weight.numpy(), w, rtol=1e-12)


def test_initial_weights_have_the_papers_bounds() -> None:
    net = tb.Hypernet(wide_resnet(16, 2), latent_dim=16, hidden_dim=32, generator=seeded(0))
    for name in net.generated:
        first, second = parts(net, name)
        for values, bound in ((first, np.sqrt(6 / 16)), (second, 0.1 * np.sqrt(6 / 32))):
            assert np.abs(values).max() <= bound
            # The variance of a uniform, bound²/3, to 6 standard errors of its estimate.
            error = bound**2 * np.sqrt(4 / 45 / values.size)
            assert abs(values.var() - bound**2 / 3) < 6 * error


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("strategy", ["all-in-one", "block-wise", "layer-wise"])
def test_hypernet_sgd_equals_plain_sgd(strategy: str, nesterov: bool) -> None:
    """The factored step against autograd's dense gradient and torch's own SGD, over several steps."""

    def make() -> tb.Hypernet:
        torch.manual_seed(0)
        model = wide_resnet(10, 1).double()
        return tb.Hypernet(model, strategy, latent_dim=6, hidden_dim=6, generator=seeded(3))

    torch.manual_seed(5)
    inputs, targets = torch.randn(4, 8, 3, 12, 12).double(), torch.randint(10, (4, 8))
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov}
    plain, fast = make(), make()
    norms = [p for m in plain.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    rest = [p for p in plain.parameters() if all(p is not n for n in norms)]
    groups = [{"params": rest, "weight_decay": 5e-3}, {"params": norms}]
    optimizers = {
        plain: torch.optim.SGD(groups, **settings),
        fast: tb.variational.HypernetSGD(fast, train_size=1000, prior=5.0, **settings),
    }
    for x, y in zip(inputs, targets, strict=True):
        losses = []
        for net, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    for name in plain.generated:
        for tree in ("first", "second"):
            one, two = (getattr(n, tree).get_parameter(name) for n in (plain, fast))
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-12)
    for (name, one), (_, two) in zip(
        plain.model.named_parameters(), fast.model.named_parameters(), strict=True
    ):
        if name not in plain.groups:
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-12)
