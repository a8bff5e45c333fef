"""MAP and MLE against torch's own optimisers, with the prior as a term of the loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb

N = 50
INPUTS = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(N) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(INPUTS), TARGETS)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> dict[str, Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        nll(net).backward()
        optimizer.step()
    return dict(net.named_parameters())


def plain(net: nn.Module, name: str, decay: float) -> torch.optim.Optimizer:
    """torch's optimiser with the L2 term on all but the norm layer."""
    norms = list(net[1].parameters())
    rest = [p for p in net.parameters() if all(p is not n for n in norms)]
    groups = [{"params": rest, "weight_decay": decay}, {"params": norms}]
    if name == "adam":
        return torch.optim.Adam(groups, lr=0.01, fused=True)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("prior", [0.0, 5.0, tb.GaussianPrior(precision=5.0)])
def test_a_gaussian_prior_is_weight_decay(name: str, prior: tb.Prior | float) -> None:
    ours, theirs = network(), network()
    decay = 0.0 if prior == 0.0 else 5.0 / N
    one = train(ours, tb.MAP(ours, 0.01, train_size=N, prior=prior, optimizer=name))
    two = train(theirs, plain(theirs, name, decay))
    for key in one:
        assert torch.equal(one[key], two[key]), key


@pytest.mark.parametrize(
    "prior",
    [
        tb.ScaleMixturePrior(0.5, 1.0, 0.1),
        tb.GaussianPrior(mean=0.5, precision=3.0),
        tb.prior.GroupLaplacePrior(2.0),
    ],
)
def test_any_prior_is_a_term_of_the_loss(prior: tb.Prior) -> None:
    ours, theirs = network().double(), network().double()
    inputs = INPUTS.double()
    optimizer = tb.MAP(ours, 0.01, train_size=N, prior=prior)
    other = plain(theirs, "adam", 0.0)
    for _ in range(10):
        for net, o in ((ours, optimizer), (theirs, other)):
            o.zero_grad()
            loss = F.cross_entropy(net(inputs), TARGETS)
            if net is theirs:
                named = {n: p for n, p in net.named_parameters() if not n.startswith("1.")}
                loss = loss - prior.log_prob(named) / N
            loss.backward()
            o.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


def test_mle_has_no_prior() -> None:
    ours, theirs = network(), network()
    one, two = train(ours, tb.MLE(ours, 0.01)), train(theirs, plain(theirs, "adam", 0.0))
    assert all(torch.equal(one[key], two[key]) for key in one)
    posterior = tb.MLE(ours).posterior()
    assert isinstance(posterior, tb.Point)
    assert torch.equal(posterior.mean()["0.weight"], ours[0].weight)


def test_state_schedulers_and_groups_are_torchs() -> None:
    whole, first = network(), network()
    train(whole, tb.MAP(whole, 0.01, train_size=N), 20)
    optimizer = tb.MAP(first, 0.01, train_size=N)
    train(first, optimizer, 10)
    second = copy.deepcopy(first)
    again = tb.MAP(second, 0.5, train_size=N)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, again, 10)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(again, max_lr=0.1, total_steps=10)
    before = again.param_groups[0]["lr"]
    train(second, again, 1)
    scheduler.step()
    assert again.param_groups[0]["lr"] != before
    net = network()
    partial = tb.MAP(net, 0.01, train_size=N, params=net[3].parameters())
    frozen = net[0].weight.clone()
    train(net, partial, 2)
    assert torch.equal(net[0].weight, frozen)
    partial.add_param_group({"params": list(net[:2].parameters()), "lr": 0.1})
    assert [group["weight_decay"] for group in partial.param_groups] == [1 / N, 1 / N, 0.0]
    train(net, partial, 2)
    assert not torch.equal(net[0].weight, frozen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr is 0"),
        ({"train_size": 0}, "train_size is 0"),
        ({"prior": -1.0}, "prior is -1"),
        ({"optimizer": "adamw"}, "optimizer is 'adamw': expected adam or sgd"),
        ({"momentum": 1.5}, "momentum is 1.5"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.MAP(network(), **{"train_size": N, **options})
