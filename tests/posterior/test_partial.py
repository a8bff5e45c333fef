"""Posteriors that hold some of a network's weights, and the digest of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.posterior import PosteriorFileError, digest_of_rest, held_names


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x).relu())
        return result


HEAD = ["head.weight", "head.bias"]


def frozen_body(seed: int = 0) -> Net:
    net = Net(seed)
    net.body.requires_grad_(False).eval()
    return net


def posteriors(net: nn.Module) -> list[tb.Posterior]:
    mean, rest = tb.snapshot(net, HEAD), digest_of_rest(net, HEAD)
    std = {"head.weight": torch.full((2, 4), 0.1)}
    samples = tb.Samples(rest=rest)
    samples.append(mean)
    samples.append(mean)
    first, second = {"head.weight": torch.ones(5, 2)}, {"head.weight": torch.ones(2, 4, 5)}
    return [
        tb.Point(mean, rest=rest),
        tb.Gaussian(mean, std, rest=rest),
        tb.LowRankGaussian(mean, std, {}, rest=rest),
        tb.KroneckerGaussian(
            mean, {"head.weight": torch.eye(2)}, {"head.weight": torch.eye(4)}, rest=rest
        ),
        samples,
        tb.posterior.Generated(
            {"head.bias": mean["head.bias"]}, first, second, {"head.weight": "all"},
            tb.latents.normal, rest=rest,
        ),
        tb.posterior.DropoutPosterior(mean, 0.5, ["body.0"], rest=rest),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(7))
def test_every_kind_holds_a_part_and_its_file_knows_the_rest(index: int, tmp_path: Path) -> None:
    net = Net()
    posterior = posteriors(net)[index]
    posterior.save(tmp_path / "q.safetensors")
    again = tb.load(tmp_path / "q.safetensors", net)
    assert again.rest == posterior.rest != ""
    assert set(again.mean()) == set(HEAD)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        tb.predictive(net, q, x, 4, generator=torch.Generator().manual_seed(2)).probs  # type: ignore[attr-defined]
        for q in (posterior, again)
    )
    assert torch.equal(ours, theirs)
    with pytest.raises(
        ValueError, match="the rest of the network is not the one that the posterior"
    ):
        again.check(Net(seed=1))
    with pytest.raises(PosteriorFileError, match="load its weights first"):
        tb.load(tmp_path / "q.safetensors", Net(seed=1))


def test_a_file_without_a_digest_needs_every_trainable_weight(tmp_path: Path) -> None:
    net = Net()
    tb.Point(tb.snapshot(net, HEAD)).save(tmp_path / "q.safetensors")
    with pytest.raises(PosteriorFileError, match=r"has no weight 'body\.0\.weight'"):
        tb.load(tmp_path / "q.safetensors", net)
    tb.load(tmp_path / "q.safetensors", frozen_body())


def test_the_digest_sees_every_change_of_the_rest_and_none_of_what_is_held() -> None:
    net = Net()
    digests = [digest_of_rest(net, HEAD)]
    with torch.no_grad():
        net.head.weight.add_(1)
    assert digest_of_rest(net, HEAD) == digests[0] == digest_of_rest(Net(), HEAD)

    def new() -> None:
        digests.append(digest_of_rest(net, HEAD))
        assert digests[-1] not in digests[:-1]

    with torch.no_grad():
        net.body[0].weight[2, 1] += 1  # type: ignore[operator, index, union-attr]
    new()
    net.body[0].weight.data.mul_(2)  # type: ignore[union-attr, operator]
    new()
    net.body[0].bias = nn.Parameter(torch.ones(4))
    new()
    net.train()(torch.randn(8, 3))  # batch norm's statistics
    new()
    net.body[1].double()
    new()
    assert digest_of_rest(net, held_names(net)) == ""


def test_what_is_held_is_what_training_changes() -> None:
    assert held_names(Net()) == list(tb.snapshot(Net()))
    assert held_names(frozen_body()) == HEAD
    statistics = [
        f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert held_names(frozen_body().train()) == HEAD + statistics
    assert held_names(Net().eval(), HEAD) == HEAD


@pytest.mark.parametrize("on_disk", [False, True])
def test_samples_hold_what_is_trained(tmp_path: Path, on_disk: bool) -> None:
    net = frozen_body()
    samples = tb.Samples(net, folder=tmp_path / "bank" if on_disk else None)
    for _ in range(2):
        nn.init.normal_(net.head.weight)
        samples.append()
    assert list(samples[0]) == HEAD
    samples.save(tmp_path / "saved")
    assert tb.load(tmp_path / "saved", net).rest == digest_of_rest(net, HEAD)
    if on_disk:
        continued = tb.Samples(net, folder=tmp_path / "bank")
        continued.append()
        assert len(continued) == 3
    nn.init.normal_(net.body[0].weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not hold have changed since the first snapshot"):
        samples.append()


def test_ten_snapshots_of_a_frozen_body_hold_the_heads_bytes_alone(tmp_path: Path) -> None:
    """A body of a megabyte, a head of 1,026 numbers: ten of them, and a header, in memory and in the file."""
    net = nn.Sequential(nn.Linear(512, 512).requires_grad_(False), nn.ReLU(), nn.Linear(512, 2))
    samples = tb.Samples(net)
    for _ in range(10):
        with torch.no_grad():
            net[2].weight.add_(1.0)
        samples.append()
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage()
        for i in range(10)
        for t in samples[i].values()
    }
    assert sum(storage.nbytes() for storage in held.values()) == 10 * 4 * 1026
    samples.save(tmp_path / "samples.safetensors")
    assert 41_040 <= (tmp_path / "samples.safetensors").stat().st_size < 41_040 + 8_192


def test_samples_of_a_body_whose_statistics_change_hold_them() -> None:
    net = frozen_body().train()
    samples = tb.Samples(net)
    for seed in range(2):
        net.train()(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)))
        net.eval()
        samples.append()
    first, second = samples
    assert not torch.equal(first["body.1.running_mean"], second["body.1.running_mean"])
    samples.check(frozen_body())
