"""Priors by name, and the gradients in closed form against autograd's of the densities."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.models import resnetpp20
from torchbayes.prior import GaussianPrior, GroupLaplacePrior, PriorByName, resnetpp_prior


def some_weights(dtype: torch.dtype = torch.float64) -> tb.Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (4, 2, 3, 3), "linear": (3, 4), "bias": (3,), "scalar": ()}
    return {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()}


def autograd(prior: tb.Prior, weights: tb.Weights) -> tb.Weights:
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    gradients = torch.autograd.grad(prior.log_prob(leaves), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize(
    "prior",
    [
        tb.prior.GroupLaplacePrior(0.7),
        tb.prior.UnitDirectionPrior(),
        PriorByName({"conv": tb.prior.UnitDirectionPrior(), "*a*": tb.prior.GroupLaplacePrior(2.0),
                     "*": tb.GaussianPrior(mean=0.1, precision=3.0)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_the_density(prior: tb.Prior, dtype: torch.dtype) -> None:
    weights = some_weights(dtype)
    weights["conv"][1] = 0  # a whole group at the kink of the group Laplace prior
    ours, truth = prior.grad(weights), autograd(prior, weights)
    assert list(ours) == list(weights)
    for name, gradient in truth.items():
        assert ours[name].dtype == dtype
        torch.testing.assert_close(ours[name], gradient)


def test_the_first_fitting_rule_decides() -> None:
    prior = PriorByName({"head.*": tb.GaussianPrior(precision=9.0), "*": tb.GaussianPrior()})
    weights = {"head.weight": torch.ones(2), "ahead.weight": torch.ones(2)}
    gradients = prior.grad(weights)
    assert gradients["head.weight"].tolist() == [-9.0, -9.0]
    assert gradients["ahead.weight"].tolist() == [-1.0, -1.0]
    parts = [
        tb.GaussianPrior(precision=9.0).log_prob({"a": torch.ones(2)}),
        tb.GaussianPrior().log_prob({"b": torch.ones(2)}),
    ]
    torch.testing.assert_close(prior.log_prob(weights), sum(parts))


def test_resnetpp_has_a_rule_for_every_kind_of_weight() -> None:
    rules = {n.rpartition(".")[2]: resnetpp_prior().rule(n) for n in resnetpp20().state_dict()}
    assert rules == {"scale": "*.scale", "direction": "*.direction", "bias": "*"}


def test_a_weight_without_a_rule_and_a_rule_without_a_prior() -> None:
    prior = PriorByName({"*.bias": tb.GaussianPrior()})
    with pytest.raises(ValueError, match=r"fits weight 'fc\.weight': the patterns are \*\.bias"):
        prior.log_prob({"fc.weight": torch.ones(1)})
    with pytest.raises(TypeError, match=r"rule '\*' has a float"):
        PriorByName({"*": 1.0})  # type: ignore[dict-item]


def test_rules_by_module_type() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    wide, narrow, group = GaussianPrior(), GaussianPrior(precision=9.0), GroupLaplacePrior(2.0)
    by_name = PriorByName({"*.bias": wide, "*": group})
    prior = PriorByName.of_modules(
        net, {nn.Conv2d: by_name, nn.modules.GroupNorm: narrow, nn.Module: wide}
    )
    weights = dict(net.named_parameters())
    owners = {"0.weight": group, "0.bias": wide, "1.weight": narrow, "1.bias": narrow}
    owners |= {"3.weight": wide, "3.bias": wide}
    assert prior.log_prob(weights).item() == pytest.approx(
        sum(owners[n].log_prob({n: w}).item() for n, w in weights.items())
    )
    gradients = prior.grad(weights)
    assert list(gradients) == list(weights)
    for name, owner in owners.items():
        assert torch.equal(gradients[name], owner.grad({name: weights[name]})[name])


def test_a_module_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"'weight' of a Linear: the types are Conv2d"):
        PriorByName.of_modules(nn.Linear(1, 1), {nn.Conv2d: GaussianPrior()})
