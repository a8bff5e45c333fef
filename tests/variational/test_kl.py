"""The KL term against torch.distributions, and when and how it may be differentiated."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

import torchbayes as tb
from torchbayes.variational import MeanField, flipout


def net_of(prior: tb.Prior, dtype: torch.dtype = torch.float64, hidden: int = 5) -> MeanField:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3)).to(dtype)
    net = MeanField(model, prior, init_std=0.2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for rho in net.rho.parameters():
            rho += torch.randn_like(rho)
    return net


def exact(net: MeanField, prior_mean: float, prior_std: float) -> torch.Tensor:
    q = net.posterior()
    mean, std = q.mean(), q.std()
    prior = Normal(*torch.tensor([prior_mean, prior_std], dtype=torch.float64))
    parts = [kl_divergence(Normal(mean[n].double(), std[n].double()), prior).sum() for n in std]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("hidden", [5, 40_000])  # small weights packed together, and large ones
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch_distributions(hidden: int, dtype: torch.dtype, rtol: float) -> None:
    net = net_of(tb.GaussianPrior(mean=0.3, precision=4.0), dtype, hidden)
    torch.testing.assert_close(net.kl().double(), exact(net, 0.3, 0.5), rtol=rtol, atol=0)
    net(torch.ones(2, 4, dtype=dtype))
    torch.testing.assert_close(net.kl().double(), exact(net, 0.3, 0.5), rtol=rtol, atol=0)


def test_gradient_equals_torch_distributions() -> None:
    net = net_of(tb.GaussianPrior(precision=4.0))
    net.kl().backward()
    ours = [p.grad for p in net.parameters()]
    prior = Normal(torch.zeros((), dtype=torch.float64), 0.5)
    theirs = torch.autograd.grad(
        sum(
            kl_divergence(Normal(m, F.softplus(r)), prior).sum()
            for m, r in zip(net.model.parameters(), net.rho.parameters(), strict=True)
        ),
        list(net.parameters()),
    )
    torch.testing.assert_close(ours, list(theirs), rtol=1e-10, atol=1e-12)


def test_a_prior_of_its_own_for_every_weight() -> None:
    net = net_of(tb.GaussianPrior())
    q = net.posterior()
    net.prior = tb.GaussianPrior.from_posterior(q)
    assert abs(net.kl().item()) < 1e-9  # the posterior itself
    other = net_of(tb.GaussianPrior()).posterior()
    net.prior = prior = tb.GaussianPrior(
        mean={n: t + 1 for n, t in q.mean().items()},
        precision={n: 1 + torch.rand_like(t) for n, t in q.mean().items()},
    )
    torch.testing.assert_close(net.kl(), prior.kl(other))
    net.kl().backward()
    weight, m = net.model[0].weight, prior.mean["0.weight"]
    expected = prior.precision["0.weight"] * (weight.detach() - m)
    torch.testing.assert_close(weight.grad, expected)


def test_a_precision_of_zero_is_no_prior() -> None:
    net = net_of(tb.GaussianPrior())
    precision = {n: torch.ones_like(t) for n, t in net.posterior().mean().items()}
    precision["0.weight"][0] = 0
    means = {n: torch.zeros_like(t) for n, t in precision.items()}
    net.prior = tb.GaussianPrior(mean=means, precision=precision)
    torch.testing.assert_close(net.kl(), net.prior.kl(net.posterior()))
    net.kl().backward()
    assert net.model[0].weight.grad[0].abs().max() == 0
    assert net.rho.get_submodule("0").weight.grad[0].abs().max() == 0
    assert net.rho.get_submodule("0").weight.grad[1].abs().min() > 0


@pytest.mark.parametrize(
    "prior", [tb.ScaleMixturePrior(0.25, 1.0, 0.1), tb.prior.GroupLaplacePrior()]
)
def test_drawn_kl_is_unbiased(prior: tb.Prior) -> None:
    net = net_of(prior)
    values = []
    for _ in range(400):
        net(torch.ones(1, 4).double())
        values.append(net.kl().item())
    values = torch.tensor(values)
    q = net.posterior()
    entropy = sum(Normal(q.mean()[n], q.std()[n]).entropy().sum() for n in q.std())
    generator = torch.Generator().manual_seed(5)
    logs = torch.stack([prior.log_prob(draw) for draw in q.draws(4000, generator)])
    error = math.hypot(values.std() / 20, logs.std() / math.sqrt(4000))
    assert abs(values.mean() - (-entropy - logs.mean())) < 4 * error


def test_mixture_written_out_equals_the_prior_class() -> None:
    net = net_of(tb.ScaleMixturePrior(0.3, 1.5, 0.05))
    samples = {}
    for name, module in net.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda m, _i, name=name: samples.update(
                    {f"{name}.weight": m.weight, f"{name}.bias": m.bias}
                )
            )
    net(torch.ones(1, 4).double())
    q = net.posterior()
    log_q = sum(
        Normal(q.mean()[n], q.std()[n]).log_prob(w.detach()).sum() for n, w in samples.items()
    )
    expected = log_q - net.prior.log_prob({n: w.detach() for n, w in samples.items()})
    torch.testing.assert_close(net.kl(), expected)


@pytest.mark.parametrize(
    "prior", [tb.GaussianPrior(), tb.ScaleMixturePrior(), tb.prior.GroupLaplacePrior()]
)
@pytest.mark.parametrize("estimator", [tb.variational.shared_draw, flipout])
def test_parts_may_be_differentiated_apart_and_in_any_order(
    prior: tb.Prior, estimator: type
) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()

    def gradients(order: str) -> list[torch.Tensor]:
        net = net_of(prior)
        net.estimator = estimator
        parts = {"nll": net(x).square().mean(), "kl": net.kl() / 10}
        if order == "together":
            sum(parts.values()).backward()
        else:
            first, second = order.split()
            # A drawn KL is of the same draw as the likelihood, so the two share a graph.
            parts[first].backward(retain_graph=not isinstance(prior, tb.GaussianPrior))
            parts[second].backward()
        return [p.grad for p in net.parameters()]

    together = gradients("together")
    torch.testing.assert_close(gradients("nll kl"), together)
    torch.testing.assert_close(gradients("kl nll"), together)


def test_graph_can_be_kept_and_used_again() -> None:
    net = net_of(tb.GaussianPrior())
    loss = net(torch.ones(2, 4).double()).square().mean() + net.kl()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_draws_before_one_backward() -> None:
    x = torch.ones(2, 4).double()
    net = net_of(tb.GaussianPrior())
    sum(net(x).square().mean() for _ in range(3)).backward()
    together = [p.grad.clone() for p in net.parameters()]
    net = net_of(tb.GaussianPrior())
    for _ in range(3):
        net(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], together)


@pytest.mark.parametrize("fused", [False, True])
def test_kl_after_a_step_is_of_the_new_parameters(fused: bool) -> None:
    net = net_of(tb.GaussianPrior())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
    net.kl().backward()
    net(torch.ones(1, 4).double())  # a draw that is never used
    optimizer.step()
    torch.testing.assert_close(net.kl(), exact(net, 0.0, 1.0))
    net.load_state_dict(net_of(tb.GaussianPrior()).state_dict())
    torch.testing.assert_close(net.kl(), exact(net_of(tb.GaussianPrior()), 0.0, 1.0))


def test_kl_without_gradients() -> None:
    net = net_of(tb.GaussianPrior())
    with torch.no_grad():
        net(torch.ones(1, 4).double())
        assert not net.kl().requires_grad
    assert net.kl().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rho", [-1e4, -95.0, -30.0, 60.0, 1e4])
def test_extreme_rho_gives_no_nan(dtype: torch.dtype, rho: float) -> None:
    net = net_of(tb.GaussianPrior(), dtype)
    with torch.no_grad():
        for parameter in net.rho.parameters():
            parameter.fill_(rho)
    out = net(torch.ones(2, 4, dtype=dtype))
    (out.float().mean() + net.kl()).backward()
    assert all(std.min() > 0 and std.isfinite().all() for std in net.std().values())
    for parameter in net.parameters():
        assert parameter.grad.isfinite().all()
    if rho < 0:  # dKL/dρ → −1 as σ → 0: the KL term still pushes σ away from 0
        grads = torch.cat([p.grad.flatten() for p in net.rho.parameters()])
        torch.testing.assert_close(
            grads.float(), torch.full_like(grads, -1).float(), rtol=0.01, atol=0
        )
