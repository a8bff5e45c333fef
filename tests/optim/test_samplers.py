"""The samplers as torch optimisers: what users do with them, and what can go wrong."""

from __future__ import annotations

import copy
import io
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchbayes.core import workspace
from torchbayes.core.noise import normals_
from torchbayes.models import resnetpp20
from torchbayes.optim import ATMC, PSGLD, SGHMC, SGLD, SGNHT
from torchbayes.optim.atmc import atmc_update
from torchbayes.optim.sampler import Sampler
from torchbayes.prior import GaussianPrior, PriorByName, resnetpp_prior

N = 40
SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "sgld": lambda model, **k: SGLD(model, **{"lr": 1e-3, "train_size": N, **k}),
    "psgld": lambda model, **k: PSGLD(model, **{"lr": 1e-4, "train_size": N, **k}),
    "sghmc": lambda model, **k: SGHMC(model, **{"lr": 0.01, "train_size": N, **k}),
    "sgnht": lambda model, **k: SGNHT(model, **{"lr": 0.05, "train_size": N, **k}),
    "sgnht, one thermostat": lambda model, **k: SGNHT(
        model, **{"lr": 0.05, "train_size": N, "per_parameter": False, **k}
    ),
    "atmc": lambda model, **k: ATMC(model, **{"lr": 0.05, "train_size": N, **k}),
    "atmc, Gaussian": lambda model, **k: ATMC(
        model, **{"lr": 0.05, "train_size": N, "max_step": math.inf, **k}
    ),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


INPUTS = torch.randn(N, 4, generator=seeded(5))
TARGETS = torch.arange(N) % 3


def backward(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(INPUTS.to(next(model.parameters()).dtype)), TARGETS)
    loss.backward()
    return loss


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def walk(model: nn.Module, sampler: Sampler, steps: int) -> Tensor:
    for _ in range(steps):
        backward(model)
        sampler.step()
    return weights(model)


# -- As a torch optimiser ---------------------------------------------------------------------------


@every_sampler
def test_a_closure_and_a_plain_step_are_the_same(name: str) -> None:
    one, two = net(), net()
    plain, closed = (SAMPLERS[name](m, generator=seeded()) for m in (one, two))
    for _ in range(4):
        loss = backward(one)
        assert plain.step() is None
        assert torch.equal(closed.step(lambda: backward(two)), loss)
    assert torch.equal(weights(one), weights(two))


@every_sampler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resume_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    whole = net().to(dtype)
    sampler = SAMPLERS[name](whole, generator=seeded())
    walk(whole, sampler, 5)
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "sampler": sampler.state_dict()}, file)
    expected = walk(whole, sampler, 5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net().to(dtype)
    again.load_state_dict(saved["model"])
    other = SAMPLERS[name](again, generator=seeded(99))
    other.load_state_dict(saved["sampler"])
    assert torch.equal(walk(again, other, 5), expected)
    assert other.state[again[0].weight]["step"] == 10
    for buffer in other.buffers:
        assert other.state[again[0].weight][buffer].dtype == dtype


@every_sampler
def test_a_scheduler_is_obeyed_down_to_zero(name: str) -> None:
    model = net()
    sampler = SAMPLERS[name](model)
    scheduler = torch.optim.lr_scheduler.LinearLR(sampler, 1.0, 0.0, total_iters=3)
    moved = []
    for _ in range(5):
        before = weights(model)
        walk(model, sampler, 1)
        scheduler.step()
        moved.append(float((weights(model) - before).abs().max()))
    assert min(moved[:3]) > 0
    assert moved[3:] == [0.0, 0.0]  # and not NaN


@every_sampler
def test_groups_can_be_added_and_have_their_own_step(name: str) -> None:
    model = net().double()
    sampler = SAMPLERS[name](model, params=model[0].parameters(), generator=seeded())
    start = weights(model)
    walk(model, sampler, 2)
    assert torch.equal(weights(model)[40:], start[40:])
    slow = 1e-4 * sampler.param_groups[0]["lr"]
    sampler.add_param_group({"params": list(model[2].parameters()), "lr": slow})
    middle = weights(model)
    walk(model, sampler, 2)
    moved = (weights(model) - middle).abs()
    assert moved[40:].max() < 0.05 * moved[:40].max()  # steps go with the root of lr at least
    assert moved[40:].max() > 0
    assert sampler.state[model[2].weight]["step"] == 2


@every_sampler
def test_frozen_and_unused_parameters_stay(name: str) -> None:
    model = net()
    model.unused = nn.Linear(3, 3)
    model[0].weight.requires_grad_(False)
    sampler = SAMPLERS[name](model)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        model.zero_grad()
        hidden = model[1](model[0](INPUTS))
        F.cross_entropy(model[2](hidden), TARGETS).backward()
        sampler.step()
    after = model.state_dict()
    for key in ("0.weight", "unused.weight", "unused.bias"):
        assert torch.equal(before[key], after[key])
    for key in ("0.bias", "2.weight", "2.bias"):
        assert not torch.equal(before[key], after[key])


@every_sampler
def test_noise_is_the_generators_alone(name: str) -> None:
    results = []
    for seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        model = net()
        sampler = SAMPLERS[name](model, generator=seeded(seed))
        torch.manual_seed(global_seed)
        results.append(walk(model, sampler, 3))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


# -- Layouts of weights and gradients ---------------------------------------------------------------


@every_sampler
@pytest.mark.parametrize("block", [8, 64])
def test_blocks_change_nothing(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor cut into blocks, in one piece, and together with others: the same numbers."""

    def result() -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(7, 6, bias=False).double()
        sampler = SAMPLERS[name](model, generator=seeded())
        for step in range(4):
            model.weight.grad = torch.randn(6, 7, generator=seeded(step)).double()
            sampler.step()
        return weights(model)

    whole = result()
    monkeypatch.setattr(workspace, "BLOCK", block)
    torch.testing.assert_close(result(), whole, rtol=1e-12, atol=1e-14)


def test_every_tensor_is_in_one_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "BLOCK", 10)
    sizes = [(3,), (25,), (2, 2), (), (6,), (9,)]
    tensors = [torch.zeros(s) for s in sizes]
    given_ones = [torch.ones(s) for s in sizes]
    for flat, ones in workspace.blocks([tensors], [given_ones]):
        assert flat.shape == ones.shape
        assert flat.numel() <= 10
        flat.add_(ones)
    assert all(bool((t == 1).all()) for t in tensors)


@every_sampler
def test_channels_last_and_sparse_gradients(name: str) -> None:
    """Another memory order, or a sparse gradient, is the same chain."""

    def result(channels_last: bool, sparse: bool) -> Tensor:
        torch.manual_seed(0)
        conv, table = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4, sparse=sparse)
        model = nn.ModuleList([conv, table])
        if channels_last:
            model.to(memory_format=torch.channels_last)
            assert not conv.weight.is_contiguous()
        sampler = SAMPLERS[name](model, generator=seeded())
        image = torch.randn(2, 3, 5, 5, generator=seeded(1))
        for _ in range(3):
            sampler.zero_grad()
            outputs = conv(image).mean((2, 3)) * table(torch.tensor([1, 3]))
            outputs.square().mean().backward()
            sampler.step()
        return weights(model)

    plain = result(channels_last=False, sparse=False)
    torch.testing.assert_close(result(True, False), plain)
    torch.testing.assert_close(result(False, True), plain)


# -- Priors -------------------------------------------------------------------------------------------


def langevin_force(model: nn.Module, prior: Any) -> dict[str, Tensor]:
    """What a step of SGLD took for ∇U, from where it went."""
    lr, names = 1e-4, [n for n, _ in model.named_parameters()]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sampler = SGLD(model, lr, train_size=N, prior=prior, generator=seeded())
    sampler.step()
    eta = torch.empty(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    normals_([eta], seeded())
    parts = eta.split([before[n].numel() for n in names])
    return {
        n: (before[n] + math.sqrt(lr) * e.view_as(p) - p.detach()) / (lr / 2)
        for (n, p), e in zip(model.named_parameters(), parts, strict=True)
    }


def test_the_priors_of_resnetpp_are_added_exactly() -> None:
    torch.manual_seed(0)
    model = resnetpp20(num_classes=3, in_channels=1, width=2).double()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    prior = resnetpp_prior()
    truth = torch.autograd.grad(prior.log_prob(leaves), list(leaves.values()))
    expected = {
        name: N * p.grad - t for (name, p), t in zip(model.named_parameters(), truth, strict=True)
    }
    for name, force in langevin_force(model, prior).items():
        torch.testing.assert_close(force, expected[name], rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize(
    "prior",
    [
        GaussianPrior(mean=0.3, precision=4.0),
        GaussianPrior(mean={"weight": torch.full((3, 2), 0.3)}, precision=4.0),
        PriorByName({"weight": GaussianPrior(mean=0.3, precision=4.0)}),
    ],
)
def test_a_gaussian_prior_in_three_spellings(prior: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3, bias=False).double()
    model.weight.grad = torch.ones(3, 2).double()
    expected = N + 4 * (model.weight.detach() - 0.3)
    torch.testing.assert_close(
        langevin_force(model, prior)["weight"], expected, rtol=1e-8, atol=1e-6
    )


# -- What can go wrong --------------------------------------------------------------------------------


@every_sampler
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_named_and_changes_nothing(name: str, bad: float) -> None:
    undisturbed, disturbed = net(), net()
    expected = walk(undisturbed, SAMPLERS[name](undisturbed, generator=seeded()), 6)
    sampler = SAMPLERS[name](disturbed, generator=seeded())
    walk(disturbed, sampler, 3)
    backward(disturbed)
    disturbed[2].bias.grad[1] = bad
    with pytest.raises(FloatingPointError, match=r"gradient of '2\.bias' is not finite"):
        sampler.step()
    assert torch.equal(walk(disturbed, sampler, 3), expected)


@every_sampler
def test_a_closure_that_raises_changes_nothing(name: str) -> None:
    undisturbed, disturbed = net(), net()
    expected = walk(undisturbed, SAMPLERS[name](undisturbed, generator=seeded()), 2)
    sampler = SAMPLERS[name](disturbed, generator=seeded())

    def broken() -> Tensor:
        raise KeyError("a bug of the user's")

    with pytest.raises(KeyError):
        sampler.step(broken)
    assert torch.equal(walk(disturbed, sampler, 2), expected)


finite = st.floats(-1e6, 1e6, width=32)


@given(
    xi=st.floats(-1e4, 1e4, width=32) | st.just(0.0), p=finite | st.just(0.0), grad=finite,
    h=st.sampled_from([0.0, 1e-12, 1e-3, 1.0]), c=st.sampled_from([math.inf, 1.0, 1e-4]),
    d=st.sampled_from([1e-6, 1.0, 1e4]), double=st.booleans(),
)  # fmt: skip
def test_atmc_is_finite_and_never_amplifies(
    xi: float, p: float, grad: float, h: float, c: float, d: float, double: bool
) -> None:
    """At ξ = 0, β → 0, h = 0 and far from them; without force and noise the momentum only shrinks."""
    dtype = torch.float64 if double else torch.float32
    values = [torch.full((3,), v, dtype=dtype) for v in (0.5, p, xi, grad, 0.7)]
    atmc_update(*values, h=h, m=11.1, c=c, d=d, n=1.0, delta=0.0)
    assert all(bool(torch.isfinite(v).all()) for v in values)
    values = [torch.full((3,), v, dtype=dtype) for v in (0.5, p, xi, 0.0, 0.0)]
    atmc_update(*values, h=h, m=11.1, c=c, d=d, n=1.0, delta=0.0)
    assert bool((values[1].abs() <= abs(p)).all())


@every_sampler
def test_huge_gradients_stay_finite_in_float32(name: str) -> None:
    model = net()
    sampler = SAMPLERS[name](model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e12)
    sampler.step()
    for state in sampler.state.values():
        for buffer in sampler.buffers:
            assert torch.isfinite(state[buffer]).all()
    assert torch.isfinite(weights(model)).all()


def test_atmcs_steps_obey_their_limit() -> None:
    model = net()
    sampler = ATMC(model, 0.01, train_size=N, average_step=1e-3, max_step=5e-3)
    for _ in range(20):
        before = weights(model)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e4)
        sampler.step()
        assert (weights(model) - before).abs().max() <= 5e-3 * (1 + 1e-4)  # rounding of the weights


def test_batch_norm_gives_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    quiet = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
    with caplog.at_level(logging.WARNING, logger="torchbayes"):
        ATMC(quiet, train_size=N)
        assert not caplog.records
        ATMC(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), train_size=N)
    (record,) = caplog.records
    assert "layer '1' is a batch norm" in record.getMessage()
    assert "group norm" in record.getMessage()


BAD: dict[str, tuple[type[Sampler], dict[str, Any], str]] = {
    "lr": (SGLD, {"lr": -1.0}, "lr is -1"),
    "lr nan": (ATMC, {"lr": math.nan}, "lr is nan"),
    "train size": (SGLD, {"train_size": 0}, "train_size is 0"),
    "temperature": (SGLD, {"temperature": 0.0}, "temperature is 0"),
    "decay": (PSGLD, {"decay": 1.0}, "decay is 1"),
    "damping": (PSGLD, {"damping": 0.0}, "damping is 0"),
    "friction above 1": (SGHMC, {"lr": 0.1, "friction": 20.0}, "is 2, so a step removes more"),
    "friction twice": (SGHMC, {"friction": 1.0, "momentum": 0.9}, "give one of the two"),
    "momentum": (ATMC, {"momentum": 1.0}, "momentum is 1"),
    "mass": (ATMC, {"mass": 0.0}, "mass is 0"),
    "mass twice": (SGNHT, {"mass": 1.0, "average_step": 0.1}, "average_step is 0.1 and mass is 1"),
    "speed limit": (ATMC, {"speed_limit": -1.0}, "speed_limit is -1"),
    "limit twice": (ATMC, {"speed_limit": 1.0, "max_step": 1.0}, "give one of the two"),
    "limit too low": (ATMC, {"average_step": 0.1, "max_step": 0.01}, "but the average step is 0.1"),
    "one thermostat, limit": (
        SGNHT, {"per_parameter": False, "max_step": 1.0}, "supports no speed limit",
    ),
    "noise": (SGHMC, {"gradient_variance": 1e9}, "more noise than the friction"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str) -> None:
    sampler, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        sampler(net(), **{"train_size": N, **options})


def test_a_schedule_that_makes_the_friction_exceed_one_is_stopped() -> None:
    model = net()
    sampler = SGHMC(model, 0.1, train_size=N, momentum=0.5)
    sampler.param_groups[0]["lr"] = 0.3
    before = weights(model)
    with pytest.raises(ValueError, match="use a smaller lr or friction"):
        walk(model, sampler, 1)
    assert torch.equal(weights(model), before)


def test_parameters_must_be_the_models_and_in_full_precision() -> None:
    with pytest.raises(TypeError, match="takes the model first"):
        SGLD(net().parameters(), 1e-3, train_size=N)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(8, 4\) is not one of Sequential's"):
        SGLD(net(), 1e-3, train_size=N, params=net().parameters())
    with pytest.raises(TypeError, match=r"'0\.weight' is bfloat16"):
        SGLD(net().bfloat16(), 1e-3, train_size=N)
    with pytest.raises(ValueError, match="no trainable weights"):
        SGLD(net().requires_grad_(False), 1e-3, train_size=N)


def test_bfloat16_autocast() -> None:
    model = net()
    sampler = ATMC(model, 0.01, train_size=N)
    for _ in range(5):
        sampler.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(INPUTS), TARGETS)
        loss.backward()
        sampler.step()
    assert torch.isfinite(weights(model)).all()
