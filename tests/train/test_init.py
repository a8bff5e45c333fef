"""Training that starts from given weights: from where, what is copied, what starts anew, what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.posterior import Samples, Weights
from torchbayes.train.registry import METHODS

from ..conformance.problems import Tied, blobs, small_net
from ..conformance.test_methods import assert_equal
from ..stopping import StopAfter, Stopped

STILL = {"epochs": 1, "progress": False}


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(3)
    net = small_net()
    optimizer, (x, y) = torch.optim.Adam(net.parameters(), lr=0.02), blobs()
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def accuracy(prediction: Any) -> float:
    return float((prediction.prediction == blobs(seed=1)[1]).float().mean())


def first_weights(init: Any, method: str = "mle", **options: Any) -> Weights:
    """The weights that training starts from: those after it with a rate of nearly 0."""
    run = tb.fit(small_net, blobs(), method, init=init, lr=1e-30, **STILL, **options)
    return run.posterior.mean()


def assert_weights(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_same_weights_in_every_form(trained: nn.Module, tmp_path: Path) -> None:
    weights = tb.snapshot(trained)
    save_file(weights, tmp_path / "plain.safetensors")
    tb.Point(weights).save(tmp_path / "point.safetensors")
    std = {name: torch.full_like(w, 0.1) for name, w in weights.items()}
    gaussian = tb.Gaussian(weights, std)
    gaussian.save(tmp_path / "gaussian.safetensors")
    forms: list[Any] = [
        trained, trained.state_dict(), weights, tb.Point(weights), gaussian,
        tmp_path / "plain.safetensors", str(tmp_path / "point.safetensors"),
        tmp_path / "gaussian.safetensors", Samples.of([trained]), [trained],
    ]  # fmt: skip
    for form in forms:
        assert_weights(first_weights(form), weights)
    assert_weights(tb.snapshot(trained), weights)  # the given network is as it was


@pytest.mark.parametrize("method", [m for m in METHODS if m != "hypernet"])
def test_every_method_starts_there(method: str, trained: nn.Module) -> None:
    """After one epoch of five updates from a trained network, every method is still right."""
    options = {"reset": []} if method == "ensemble" else {}
    run = tb.fit(
        small_net, blobs(), method, init=trained, epochs=1, batch_size=48, progress=False, **options
    )
    generator = torch.Generator().manual_seed(0)
    assert accuracy(run.predict(blobs(seed=1)[0], generator=generator)) > 0.9


@pytest.mark.parametrize("method", ["map", "swag", "sgld", "ensemble"])
@pytest.mark.parametrize("stop", [1, 7])
def test_resume_is_bit_equal(method: str, stop: int, trained: nn.Module, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 60, "checkpoint_seconds": 0}
    if method in ("sgld", "ensemble"):
        settings["chains" if method == "sgld" else "members"] = 2
    settings |= {"init": trained, "reset": ["2"]}
    whole = tb.fit(small_net(), blobs(), method, progress=False, folder=tmp_path / "a", **settings)
    with pytest.raises(Stopped):
        tb.fit(
            small_net(),
            blobs(),
            method,
            folder=tmp_path / "b",
            progress=StopAfter(stop),
            **settings,
        )
    resumed = tb.fit(
        small_net(), blobs(), method, folder=tmp_path / "b", resume=True, progress=False, **settings
    )
    assert_equal(whole.posterior, resumed.posterior)
    other = {**settings, "init": small_net()}
    with pytest.raises(ValueError, match="holds a run with init_checksum"):
        tb.fit(
            small_net(),
            blobs(),
            method,
            folder=tmp_path / "b",
            resume=True,
            progress=False,
            **other,
        )


def test_what_is_reset_starts_anew(trained: nn.Module) -> None:
    weights = tb.snapshot(trained)
    found = first_weights(trained, reset="2")
    assert torch.equal(found["0.weight"], weights["0.weight"])
    assert not torch.equal(found["2.weight"], weights["2.weight"])
    assert not torch.equal(found["2.bias"], weights["2.bias"])
    # A network that is passed is drawn anew too, with its own reset_parameters.
    own = tb.snapshot(net := small_net())
    run = tb.fit(net, blobs(), "mle", init=net, reset=["*.bias"], lr=1e-30, **STILL)
    assert torch.equal(run.posterior.mean()["2.weight"], own["2.weight"])
    assert not torch.equal(run.posterior.mean()["2.bias"], own["2.bias"])


def test_a_head_of_another_size(trained: nn.Module) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 5))

    with pytest.raises(
        ValueError, match=r"'2.weight' has shape \(3, 16\) in init .* but \(5, 16\).*reset=\['2'\]"
    ):
        tb.fit(make, blobs(), init=trained, **STILL)
    body = {name: w for name, w in tb.snapshot(trained).items() if name.startswith("0.")}
    for init in (trained, body):
        run = tb.fit(make, blobs(), "mle", init=init, reset=["2"], lr=1e-30, **STILL)
        assert torch.equal(run.posterior.mean()["0.weight"], body["0.weight"])


def members(run: tb.Run) -> list[Weights]:
    assert isinstance(run.posterior, Samples)
    return list(run.posterior)


@pytest.mark.parametrize("make", [small_net, small_net()], ids=["function", "network"])
def test_an_ensemble_has_new_last_layers(make: Any, trained: nn.Module) -> None:
    run = tb.fit(make, blobs(), "ensemble", init=trained, members=3, lr=1e-30, prior=0.0, **STILL)
    one, two, three = members(run)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(one[name], trained.state_dict()[name])
        assert torch.equal(one[name], three[name])
    assert not torch.equal(one["2.weight"], two["2.weight"])
    assert not torch.equal(two["2.weight"], three["2.weight"])
    assert not torch.equal(one["2.weight"], trained.state_dict()["2.weight"])


def test_an_ensemble_from_several_networks(trained: nn.Module) -> None:
    nets = [trained, small_net(), small_net()]
    for init in (nets, Samples.of(nets)):
        run = tb.fit(small_net, blobs(), "ensemble", init=init, lr=1e-30, prior=0.0, **STILL)
        for found, net in zip(members(run), nets, strict=True):
            assert_weights(found, tb.snapshot(net))
    with pytest.raises(ValueError, match="members is 5, but init has 3 starting points"):
        tb.fit(small_net, blobs(), "ensemble", init=nets, members=5, **STILL)
    with pytest.raises(ValueError, match="init has 3 starting points, but this method trains one"):
        tb.fit(small_net, blobs(), "map", init=nets, **STILL)
    p = tb.predictive(trained, Samples.of(nets), blobs()[0])  # a posterior without any training
    assert p.draws == 3


@pytest.mark.parametrize("init", [True, False])
def test_frozen_layers_are_never_reset(init: bool, trained: nn.Module) -> None:
    net = small_net()
    net.load_state_dict(trained.state_dict())
    net[0].requires_grad_(False)  # type: ignore[index]
    start = {"init": net} if init else {}
    run = tb.fit(net, blobs(), "ensemble", members=2, **start, **STILL)
    one, two = members(run)
    for weights in (one, two):
        assert "0.weight" not in weights  # frozen, so that the network has it
    assert torch.equal(run.model[0].weight, trained[0].weight)  # type: ignore[index]
    assert torch.equal(run.model[0].bias, trained[0].bias)  # type: ignore[index]
    assert not torch.equal(one["2.weight"], two["2.weight"])
    with pytest.raises(ValueError, match="reset names '0', whose weights are frozen"):
        tb.fit(net, blobs(), "ensemble", init=net, reset=["0"], **STILL)


def test_several_chains_start_there(trained: nn.Module) -> None:
    for side_by_side in (False, True):
        run = tb.fit(
            small_net, blobs(), "sgld", init=trained, chains=2, side_by_side=side_by_side, samples=1,
            lr=1e-30, **STILL,
        )  # fmt: skip
        for weights in members(run):
            for name, given in tb.snapshot(trained).items():
                torch.testing.assert_close(weights[name], given, rtol=0, atol=1e-10)


def test_moped_is_a_share_of_the_given_weights(trained: nn.Module) -> None:
    run = tb.fit(small_net, blobs(), "bbb", init=trained, moped=0.1, lr=1e-30, **STILL)
    assert isinstance(run.posterior, tb.Gaussian)
    for name, given in tb.snapshot(trained).items():
        expected = 0.1 * given.abs().clamp_min(1e-3)
        torch.testing.assert_close(run.posterior.std()[name], expected, rtol=1e-4, atol=0)


def test_tied_weights_have_either_name() -> None:
    torch.manual_seed(0)
    net = Tied()
    for init in (net, net.state_dict()):
        run = tb.fit(Tied, blobs(), "mle", init=init, lr=1e-30, **STILL)
        assert_weights(run.posterior.mean(), tb.snapshot(net))
    by_alias = dict(net.state_dict())
    del by_alias["first.weight"]
    run = tb.fit(Tied, blobs(), "mle", init=by_alias, lr=1e-30, **STILL)
    assert_weights(run.posterior.mean(), tb.snapshot(net))


def test_it_says_what_it_did(
    trained: nn.Module, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "torchbayes"):
        tb.fit(small_net, blobs(), "ensemble", init=trained, members=1, epochs=1)
    line = "ensemble starts from the weights of the given Sequential; new random weights: 2.weight, 2.bias"
    assert line in caplog.messages
    assert line in " ".join(capsys.readouterr().err.split())
    with caplog.at_level(logging.INFO, "torchbayes"):
        tb.fit(small_net(), blobs(), "ensemble", members=1, **STILL)
    assert "not those of the given network" in caplog.messages[-1]


def test_what_does_not_fit_is_refused_in_one_sentence(trained: nn.Module, tmp_path: Path) -> None:
    weights = tb.snapshot(trained)
    (tmp_path / "broken.safetensors").write_bytes(b"12345678abc")
    Samples.of([trained, small_net()]).save(tmp_path / "two.safetensors")
    less = {name: w for name, w in weights.items() if name != "2.bias"}
    parallel = {f"module.{name}": w for name, w in weights.items()}
    nan: dict[str, Tensor] = {**weights, "0.bias": weights["0.bias"] / 0}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({**weights, "9.weight": torch.zeros(1)}, {}, "has a weight '9.weight' that Sequential does not"),
        (parallel, {}, "remove 'module.' from the front of every name"),
        (less, {}, r"has no weight '2.bias', which Sequential needs.*reset=\['2'\]"),
        (nan, {}, "weight '0.bias' of init .* is not finite"),
        (trained, {"reset": ["head"]}, "reset names 'head', but Sequential has no such weight"),
        (None, {"reset": ["2"]}, "without init all weights are the network's own"),
        ([], {}, "init has 0 starting points"),
        ("nowhere.safetensors", {}, "there is no such file"),
        ("moped", {}, "for MOPED give moped=0.1"),
        (tmp_path / "broken.safetensors", {}, "cut short, damaged or not a safetensors file"),
        (tmp_path / "two.safetensors", {}, "holds 2 networks, whose average is none of them"),
        (trained, {"method": "hypernet"}, "hypernet generates its weights"),
    ]  # fmt: skip
    for init, options, message in cases:
        with pytest.raises(ValueError, match=message):
            tb.fit(small_net, blobs(), init=init, **STILL, **options)
    with pytest.raises(TypeError, match="init is a int: expected a state dict"):
        tb.fit(small_net, blobs(), init=3, **STILL)  # type: ignore[arg-type]
