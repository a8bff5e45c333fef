"""A frozen body and a Bayesian head: files and memory grow with what varies, not with the network."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.train.run_folder import RunFolder

from ..stopping import StopAfter, Stopped

WIDTH = 700  # a body of 1.5 million weights, 5.9 MB
HEAD = 3 * (WIDTH + 1)


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.body = nn.Sequential(
                nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(),
                nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            )  # fmt: skip
            self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize(
    ("method", "per_weight"),
    [
        ("sgld", 10),
        ("ensemble", 10),
        ("swag", 22),
        ("vogn", 2),
        ("ivon", 2),
        ("bbb", 2),
        ("map", 1),
    ],
)
def test_files_are_as_large_as_what_varies(method: str, per_weight: int, tmp_path: Path) -> None:
    options = {"sgld": {"samples": 10}, "ensemble": {"members": 10}}.get(method, {})
    network = Pretrained()
    run = tb.fit(
        network, data(), method, params="head", epochs=1, batch_size=6, lr=1e-4, progress=False,
        **options,
    )  # fmt: skip
    run.posterior.save(tmp_path / "q.safetensors")
    size = (tmp_path / "q.safetensors").stat().st_size
    assert size < 4 * HEAD * per_weight + 8_000  # names and header
    run.posterior.check(network)
    # The body was not copied either: the trained network uses the same memory.
    mine, its = network.body[3].weight, run.model.body[3].weight  # type: ignore[union-attr, index]
    assert mine.data_ptr() == its.data_ptr()  # type: ignore[operator, union-attr]
    assert network.head.weight.data_ptr() != run.model.head.weight.data_ptr()  # type: ignore[operator, union-attr]


def test_predicting_does_not_copy_the_body() -> None:
    network = Pretrained().eval()
    bank = tb.Samples(network, params="head.*")
    for seed in range(30):
        torch.manual_seed(seed)
        nn.init.normal_(network.head.weight)
        bank.append()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tb.predictive(network, bank, torch.randn(2, 4), samples=30)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 30_000  # kB; thirty bodies are 177,000


def test_the_same_predictions_as_with_the_whole_network() -> None:
    """Truth: every draw written into a copy of the network."""
    network = Pretrained()
    posterior = tb.fit(
        network, data(), "vogn", params=network.head, epochs=2, progress=False
    ).posterior
    x = torch.randn(5, 4)
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    probs = []
    for draw in posterior.draws(4, seeds[0]):
        twin = copy.deepcopy(network).eval()
        assert list(draw) == ["head.weight", "head.bias"]
        twin.load_state_dict(draw, strict=False)
        probs.append(twin(x).softmax(1))
    found = tb.predictive(network, posterior, x, 4, generator=seeds[1]).probs  # type: ignore[attr-defined]
    torch.testing.assert_close(found, torch.stack(probs).mean(0))


def test_batch_norm_of_a_frozen_body_keeps_its_statistics_in_fit() -> None:
    network = Pretrained()
    run = tb.fit(network, data(), "swag", params="head.*", epochs=2, lr=1e-4, progress=False)
    assert set(run.posterior.mean()) == {"head.weight", "head.bias"}
    for ours, its in zip(network.buffers(), run.model.buffers(), strict=True):
        assert torch.equal(ours, its)
    frozen = copy.deepcopy(network)
    frozen.body.requires_grad_(False)
    assert set(tb.fit(frozen, data(), "map", epochs=1, progress=False).posterior.mean()) == {
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize("method", ["vogn", "sgld", "swag", "bbb", "ensemble"])
def test_a_stopped_partial_run_resumes_bit_equal(method: str, tmp_path: Path) -> None:
    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    settings: dict[str, Any] = {
        "method": method, "params": "3.*", "epochs": 3, "batch_size": 16, "checkpoint_seconds": 0,
    }  # fmt: skip
    network = small()
    with pytest.raises(Stopped):
        tb.fit(network, data(), folder=tmp_path / "run", progress=StopAfter(7), **settings)
    run = tb.fit(network, data(), folder=tmp_path / "run", resume=True, progress=False, **settings)
    whole = tb.fit(network, data(), progress=False, **settings)
    one, two = run.posterior, whole.posterior
    assert one.rest == two.rest != ""
    for a, b in zip(one.draws(3, torch.Generator()), two.draws(3, torch.Generator()), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    # The folder has the rest too, so that it can be used without the network that was passed.
    fresh = small()
    nn.init.zeros_(fresh[0].weight)  # type: ignore[index, arg-type]
    RunFolder(tmp_path / "run").read_rest(fresh)
    tb.load(tmp_path / "run" / "posterior.safetensors", fresh)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("haed.*", "params has 'haed.*', but no weight or module of Pretrained"),
        ("haed.*", "is called so: did you mean 'head"),
        ("lora", "its modules are body, head"),
        ([], "params is empty"),
        (nn.Linear(1, 1), "params has a Linear, which has 0 weights of Pretrained"),
        ([3], "params has a int: expected names or patterns"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_named(params: Any, message: str) -> None:
    network = Pretrained()
    for call in (
        lambda: tb.fit(network, data(), "map", params=params, progress=False),
        lambda: tb.SGLD(network, train_size=9, params=params),
        lambda: tb.MeanField(network, params=params),
        lambda: tb.SWA(network, params=params),
        lambda: tb.Samples(network, params=params),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert message in str(error.value)


def test_every_spelling_is_the_same_choice() -> None:
    network = Pretrained()
    head = list(network.head.parameters())
    for params in (
        "head", "head.*", "*head*", ["head.weight", "head.bias"], network.head, head, iter(head),
        [network.head], network.head.named_parameters(), [{"params": "head"}],
        [{"params": head[0]}, {"params": "head.bias", "lr": 1e-3}],
    ):  # fmt: skip
        optimizer = tb.VOGN(network, train_size=9, params=params)
        chosen = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in chosen] == [id(p) for p in head]
    added = tb.SGLD(network, train_size=9, params="head.weight")
    added.add_param_group({"params": "head.bias", "lr": 1e-4})
    assert added.param_groups[1]["params"][0] is network.head.bias


def test_by_hand_what_is_not_chosen_is_neither_drawn_nor_moved() -> None:
    network, (x, y) = Pretrained().eval(), data()
    before = tb.snapshot(network)
    seen: list[Tensor] = []
    optimizer = tb.IVON(network, train_size=64, params="head.*")
    for _ in range(2):
        with optimizer.sampled():
            optimizer.zero_grad()
            seen.append(network.body[0].weight.detach().clone())  # type: ignore[operator, union-attr]
            F.cross_entropy(network(x), y).backward()
        optimizer.step()
    assert all(torch.equal(weight, before["body.0.weight"]) for weight in seen)
    now = tb.snapshot(network)
    assert [n for n in now if not torch.equal(now[n], before[n])] == ["head.weight", "head.bias"]
    assert list(optimizer.posterior().mean()) == ["head.weight", "head.bias"]


def test_a_network_that_comes_in_eval_mode_resumes_too(tmp_path: Path) -> None:
    """Its counter is a buffer of a frozen part, which the average has to hold: training changes it."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return x

    network = nn.Sequential(nn.Linear(4, 8), Counting(), nn.Linear(8, 3)).eval()
    settings: dict[str, Any] = {
        "method": "swag", "params": "2", "epochs": 4, "batch_size": 16, "checkpoint_seconds": 0,
    }  # fmt: skip
    with pytest.raises(Stopped):
        tb.fit(network, data(), folder=tmp_path, progress=StopAfter(13), **settings)
    run = tb.fit(network, data(), folder=tmp_path, resume=True, progress=False, **settings)
    assert run.posterior.mean()["1.calls"] == 16
    assert network[1].calls == 0
