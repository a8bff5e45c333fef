"""Branching, parallelizing and widening against the plain network they have to reduce to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.models import (
    pyramidnet110_a48,
    resnext29_8x64d,
    vgg11,
    wide_resnet,
)
from torchbayes.models.resnet import BasicBlock

AVERAGES: list[Callable[..., nn.Module]] = [
    tb.average.branching,
    tb.average.parallelizing,
    tb.average.widening,
]
every_average = pytest.mark.parametrize("average", AVERAGES, ids=lambda f: f.__name__)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def batches() -> list[Tensor]:
    generator = seeded(0)
    return [torch.randn(16, 3, 12, 12, generator=generator) * 2 + 0.3 for _ in range(3)]


@pytest.fixture
def net() -> tb.Hypernet:
    torch.manual_seed(0)
    return tb.Hypernet(wide_resnet(10, 1), latent_dim=4, hidden_dim=4, generator=seeded(1))


def one_point(net: tb.Hypernet) -> tb.Gaussian:
    """A posterior without spread: all its draws are the same."""
    return tb.Gaussian(net.posterior().sample(seeded(2)), {})


def by_hand(model: nn.Module, weights: tb.Weights, batches: list[Tensor]) -> nn.Module:
    """The draw in the network, with one pass of cumulative averages by torch itself."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(weights)
    for norm in twin.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.momentum = None
    twin.train()
    with torch.no_grad():
        for batch in batches:
            twin(batch)
    return twin.eval()


@every_average
def test_one_time_is_the_frozen_draw(
    average: Callable[..., nn.Module], net: tb.Hypernet, batches: list[Tensor]
) -> None:
    draw = net.posterior().sample(seeded(5))
    expected = by_hand(net.model, draw, batches)(batches[0])
    torch.testing.assert_close(tb.average.freeze(net, draw, batches)(batches[0]), expected)
    averaged = average(net, net.posterior(), 1, batches, generator=seeded(5))
    torch.testing.assert_close(averaged(batches[0]), expected)


@every_average
@pytest.mark.parametrize("times", [2, 3])
def test_identical_draws_change_nothing(
    average: Callable[..., nn.Module], times: int, net: tb.Hypernet, batches: list[Tensor]
) -> None:
    point = one_point(net)
    expected = tb.average.freeze(net, point.sample(), batches)(batches[1])
    averaged = average(net, point, times, batches)(batches[1])
    torch.testing.assert_close(averaged, expected, rtol=1e-3, atol=1e-4)


def test_re_estimation_is_one_pass_of_cumulative_averages(
    net: tb.Hypernet, batches: list[Tensor]
) -> None:
    wide = tb.average.widening(net, net.posterior(), 2, batches, generator=seeded(3))
    again = by_hand(wide, wide.state_dict(), batches)
    for (name, one), (_, two) in zip(wide.named_buffers(), again.named_buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)


def test_branches_average_logits_or_probabilities(net: tb.Hypernet, batches: list[Tensor]) -> None:
    posterior, x = net.posterior(), batches[0]
    singles = []
    generator = seeded(7)
    for _ in range(3):
        singles.append(tb.average.freeze(net, posterior.sample(generator), batches)(x))
    outputs = torch.stack(singles)
    logits = tb.average.branching(net, posterior, 3, batches, generator=seeded(7))
    torch.testing.assert_close(logits(x), outputs.mean(0))
    probabilities = tb.average.branching(
        net, posterior, 3, batches, generator=seeded(7), probabilities=True
    )
    torch.testing.assert_close(probabilities(x).exp(), outputs.softmax(-1).mean(0))


def test_widened_kernels_are_tiles_of_draws(net: tb.Hypernet, batches: list[Tensor]) -> None:
    draws = [net.posterior().sample(g) for g in [seeded(9)] for _ in range(4)]
    wide = tb.average.widening(net, net.posterior(), 2, batches, generator=seeded(9))
    kernel = wide.layer2[0].conv2.weight
    for row in range(2):
        for column in range(2):
            tile = kernel[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            draw = draws[2 * row + column]["layer2.0.conv2.weight"]
            torch.testing.assert_close(tile, draw / 2)
    own = sum(p.numel() for n, p in net.model.named_parameters() if "layer" in n and "conv" in n)
    more = sum(p.numel() for n, p in wide.named_parameters() if "layer" in n and p.dim() == 4)
    shortcuts = sum(p.numel() for n, p in net.model.named_parameters() if "shortcut" in n)
    assert more == 4 * (own + shortcuts)


def test_every_copy_has_its_own_batch_norm(net: tb.Hypernet, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 1.5)
    parallel = tb.average.parallelizing(net, net.posterior(), 2, batches, generator=seeded(3))
    one, two = (block.bn2 for block in parallel.layer2[0].blocks)
    assert torch.equal(one.weight, two.weight)
    assert one.weight.data_ptr() != two.weight.data_ptr()
    assert not torch.equal(one.running_mean, two.running_mean)


def test_an_average_is_a_plain_network(net: tb.Hypernet, batches: list[Tensor]) -> None:
    for average in AVERAGES:
        plain = average(net, net.posterior(), 2, batches)
        assert not any(isinstance(m, tb.Hypernet) for m in plain.modules())
        assert not any("first" in name or "second" in name for name in plain.state_dict())
        assert not plain.training
        copy.deepcopy(plain).load_state_dict(plain.state_dict())


def test_ensemble_members_keep_their_statistics(batches: list[Tensor]) -> None:
    bank = tb.Samples(wide_resnet(10, 1))
    models = [wide_resnet(10, 1) for _ in range(2)]
    for model in models:
        bank.append(tb.snapshot(model(batches[0]) is None or model))
    both = tb.average.branching(models[0], bank, 2)(batches[1])
    expected = torch.stack([model.eval()(batches[1]) for model in models]).mean(0)
    torch.testing.assert_close(both, expected)
    with pytest.raises(ValueError, match="only 2"):
        tb.average.branching(models[0], bank, 3)


@every_average
def test_batch_norm_needs_data(average: Callable[..., nn.Module], net: tb.Hypernet) -> None:
    with pytest.raises(ValueError, match="pass a loader of training data"):
        average(net, net.posterior(), 2)
    with pytest.raises(ValueError, match="no batches"):
        average(net, net.posterior(), 2, [])
    with pytest.raises(ValueError, match="times is 0"):
        average(net, net.posterior(), 0, [torch.zeros(2, 3, 8, 8)])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (resnext29_8x64d, "grouped"),
        (pyramidnet110_a48, "do more with channels"),
        (vgg11, "no residual blocks"),
    ],
)
def test_what_cannot_be_widened_is_refused(
    make: Callable[[], nn.Module], reason: str, batches: list[Tensor]
) -> None:
    model = make()
    point = tb.Gaussian(tb.snapshot(model), {})
    with pytest.raises(ValueError, match=f"cannot be widened: .*{reason}"):
        tb.average.widening(model, point, 2, [batches[0][:2]])


def test_blocks_with_projections_are_widened(batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    point = tb.Gaussian(tb.snapshot(model), {})
    expected = tb.average.freeze(model, point.sample(), batches)(batches[0])
    wide = tb.average.widening(model, point, 2, batches)(batches[0])
    torch.testing.assert_close(wide, expected, rtol=1e-3, atol=1e-4)
