"""What every method in the registry must do. Registering a method enrols it here."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path

import pytest
import torch

import torchbayes as tb
from torchbayes.core.declaration import FAMILIES
from torchbayes.posterior import Samples, Weights
from torchbayes.train.method import Plan
from torchbayes.train.registry import METHODS

from ..stopping import StopAfter, Stopped
from .problems import ODD_MODULES, blobs, small_net

every_method = pytest.mark.parametrize("method", list(METHODS))


def tensors(posterior: tb.Posterior) -> Weights:
    if isinstance(posterior, Samples):
        return {f"{i}/{n}": t for i, w in enumerate(posterior) for n, t in w.items()}
    groups = posterior._file_tensors()
    return {f"{group}/{n}": t for group, weights in groups.items() for n, t in weights.items()}


def assert_equal(left: tb.Posterior, right: tb.Posterior) -> None:
    one, two = tensors(left), tensors(right)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def without_seconds(history: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@every_method
def test_learns_an_easy_problem(method: str) -> None:
    inputs, targets = blobs()
    run = tb.fit(small_net, (inputs, targets), method, epochs=60, batch_size=32, progress=False)
    fresh, truth = blobs(seed=1)
    prediction = run.predict(fresh, generator=torch.Generator().manual_seed(0))
    assert (prediction.prediction == truth).float().mean() > 0.9
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(fresh)))
    assert type(run.posterior).__name__ == METHODS[method].posterior_kind


@every_method
@pytest.mark.parametrize("stop", [1, 7, 16])
def test_resume_is_bit_equal(method: str, stop: int, tmp_path: Path) -> None:
    settings = {"epochs": 2, "batch_size": 30, "schedule": "cosine", "checkpoint_seconds": 0}
    whole = tb.fit(small_net, blobs(), method, progress=False, folder=tmp_path / "a", **settings)
    with pytest.raises(Stopped):
        tb.fit(
            small_net, blobs(), method, folder=tmp_path / "b", progress=StopAfter(stop), **settings
        )
    resumed = tb.fit(
        small_net, blobs(), method, folder=tmp_path / "b", resume=True, progress=False, **settings
    )
    assert_equal(whole.posterior, resumed.posterior)
    assert without_seconds(whole.history) == without_seconds(resumed.history)


@every_method
def test_seed_decides_everything(method: str) -> None:
    def fit(seed: int) -> tb.Posterior:
        return tb.fit(small_net, blobs(), method, epochs=1, seed=seed, progress=False).posterior

    torch.manual_seed(1)
    first = fit(3)
    torch.manual_seed(2)
    assert_equal(first, fit(3))
    one, other = tensors(first), tensors(fit(4))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@every_method
@pytest.mark.parametrize("module", list(ODD_MODULES))
def test_odd_modules(method: str, module: str) -> None:
    make, data = ODD_MODULES[module]
    torch.manual_seed(0)
    before = make()
    run = tb.fit(make, data(), method, epochs=1, batch_size=8, progress=False)
    run.posterior.check(before)
    draw = run.posterior.sample(torch.Generator().manual_seed(0))
    was = tb.snapshot(before)
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad:
            assert torch.isfinite(draw[name]).all(), name
        else:
            assert name not in draw, f"{name} is frozen"
            assert torch.equal(parameter, was[name]), f"{name} is frozen"
    probs = run.predict(data(8)[0], samples=2).probs
    torch.testing.assert_close(probs.sum(1), torch.ones(8))


@every_method
def test_only_what_is_chosen_is_trained_and_held(method: str, tmp_path: Path) -> None:
    network, data = small_net(), blobs()
    before, names = tb.snapshot(network), ["0.weight", "2.weight", "2.bias"]
    options = {"epochs": 2, "folder": tmp_path, "progress": False}
    run = tb.fit(network, data, method, params=["0.weight", network[2]], **options)
    mean = run.posterior.mean()
    assert set(mean) == set(names)
    assert run.posterior.rest
    now = tb.snapshot(run.model)
    assert torch.equal(now["0.bias"], before["0.bias"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tb.snapshot(network).items())
    assert all(p.requires_grad for p in network.parameters())
    assert not any(torch.equal(now[name], before[name]) for name in names[1:])
    q = tb.load(tmp_path / "posterior.safetensors", network)
    seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
    one = run.predict(data[0], samples=4, generator=seeds[0])
    two = tb.predictive(network, q, data[0], 4, generator=seeds[1])
    assert torch.equal(one.probs, two.probs)


@every_method
def test_file_round_trip(method: str, tmp_path: Path) -> None:
    run = tb.fit(small_net, blobs(), method, epochs=1, progress=False, folder=tmp_path)
    loaded = tb.load(tmp_path / "posterior.safetensors", run.model)
    assert type(loaded) is type(run.posterior)
    assert_equal(run.posterior, loaded)
    inputs = blobs()[0]
    seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
    one = tb.predictive(run.model, run.posterior, inputs, 4, generator=seeds[0])
    two = tb.predictive(run.model, loaded, inputs, 4, generator=seeds[1])
    assert torch.equal(one.probs, two.probs)


@every_method
def test_double_precision_and_autocast(method: str) -> None:
    inputs, targets = blobs()
    run = tb.fit(
        lambda: small_net().double(), (inputs.double(), targets), method, epochs=1, progress=False
    )
    assert run.predict(inputs.double(), samples=2).probs.dtype == torch.float64
    tb.fit(small_net, (inputs, targets), method, epochs=1, amp="bfloat16", progress=False)


@every_method
def test_float16_with_gradient_scaling(method: str) -> None:
    run = tb.fit(small_net, blobs(), method, epochs=2, amp="float16", progress=False)
    for name, tensor in run.posterior.sample(torch.Generator().manual_seed(0)).items():
        assert torch.isfinite(tensor.float()).all(), name


@every_method
def test_clipping_and_accumulation_run(method: str) -> None:
    run = tb.fit(
        small_net, blobs(), method, epochs=2, batch_size=30, accumulate=4, clip_norm=1.0,
        progress=False,
    )  # fmt: skip
    assert all(row["loss"] == row["loss"] for row in run.history)


@every_method
def test_leaves_torch_as_it_was(method: str) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    tb.fit(small_net, blobs(), method, epochs=1, progress=False)
    assert torch.equal(torch.rand(3), expected)


@every_method
def test_describes_itself(method: str) -> None:
    cls = METHODS[method]
    assert cls.summary
    assert "\n" not in cls.summary
    assert cls.paper
    assert cls.family in FAMILIES
    from torchbayes.train.registry import method_options

    for option in method_options(cls).values():
        assert option.meaning, f"{method}: option {option.name} is not documented"
        assert option.default is not inspect.Parameter.empty, (
            f"{method}: {option.name} has no default"
        )


@every_method
def test_refuses_a_model_without_trainable_weights(method: str) -> None:
    frozen = small_net().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable weights"):
        tb.fit(lambda: frozen, blobs(), method, epochs=1, progress=False)


def test_every_method_has_a_file_of_its_own() -> None:
    modules = [cls.__module__ for cls in METHODS.values()]
    shared = [m for m, group in itertools.groupby(sorted(modules)) if len(list(group)) > 2]
    assert not shared
    assert Plan.__doc__
