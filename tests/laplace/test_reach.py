"""A posterior that is too wide for its approximation is narrowed, and no other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchbayes as tb


def cost(net: nn.Linear, la: tb.Laplace, x: Tensor, y: Tensor, draws: int = 4000) -> float:
    """NLL of the average over draws less that of the network, by hand, in float64."""
    posterior, generator = la.posterior(), torch.Generator().manual_seed(7)
    drawn = [posterior.sample(generator) for _ in range(draws)]
    weight = torch.stack([w["weight"] for w in drawn]).double()
    bias = torch.stack([w["bias"] for w in drawn]).double()
    logits = torch.einsum("ni,sci->snc", x.double(), weight) + bias.unsqueeze(1)
    log_probs = (logits.log_softmax(2).logsumexp(0) - math.log(draws)).gather(1, y.unsqueeze(1))
    return float(-log_probs.mean() - cross_entropy(net(x), y).detach())


@pytest.fixture
def separable() -> tuple[nn.Linear, Tensor, Tensor]:
    """Two classes far apart, and a network that is certain of all of them."""
    torch.manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 2) + 10 * y.unsqueeze(1) - 5
    net = nn.Linear(2, 2)
    net.weight.data = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    net.bias.data.zero_()
    return net.eval(), x, y


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
def test_the_precision_is_the_least_that_is_enough(
    separable: tuple[nn.Linear, Tensor, Tensor], structure: str
) -> None:
    net, x, y = separable
    la = tb.Laplace(net, (x, y), structure=structure, prior=0.01, check=False)
    assert cost(net, la, x, y) > 0.05  # too wide: there is hardly any curvature
    assert la.narrow()
    # What is next to nothing depends on what the network loses: a tenth of it. 32 draws measure the cost: its
    # own error is what the bounds leave room for.
    most = min(0.01, 0.1 * float(cross_entropy(net(x), y).detach()))
    assert most < 0.001  # the network fits the labels perfectly
    assert cost(net, la, x, y) < 1.5 * most
    assert math.log2(la.prior.scalar / 0.01) == pytest.approx(
        round(math.log2(la.prior.scalar / 0.01))
    )
    la.prior = la.prior.scalar / 4
    assert cost(net, la, x, y) > most
    assert not tb.Laplace(net, (x, y), prior=1e4, check=False).narrow()


def test_where_the_approximation_is_exact_nothing_changes() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(200, 1)
    net = nn.Linear(3, 1)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(200, 1)], 1), y).solution
    net.weight.data, net.bias.data = solution[:3].T.contiguous(), solution[3]
    la = tb.Laplace(net.eval(), (x, y), tb.GaussianNoise(0.3), prior=1e-3)
    assert not la.narrow()
    assert la.prior.scalar == pytest.approx(1e-3)


def test_too_few_examples_and_other_priors_are_left_alone(
    separable: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    net, x, y = separable
    assert not tb.Laplace(net, (x[:8], y[:8]), prior=0.01, check=False).narrow()
    each = {"weight": torch.full((2, 2), 0.01), "bias": torch.full((2,), 0.01)}
    prior = tb.GaussianPrior(precision=each)
    assert not tb.Laplace(net, (x, y), prior=prior, check=False).narrow()
