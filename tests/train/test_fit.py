"""`fit` against a loop written by hand, and what it does when things go wrong."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchbayes as tb
from torchbayes.data import BatchLoader
from torchbayes.train import checkpoint
from torchbayes.train.progress import Progress
from torchbayes.train.run_folder import RunError, RunFolder

from ..conformance.problems import blobs, small_net
from ..stopping import StopAfter, Stopped


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return small_net()


def by_hand(model: nn.Module, epochs: int, batch_size: int, decay: float, seed: int = 0) -> None:
    """Ordinary PyTorch: what `map` must equal."""
    inputs, targets = blobs()
    loader = BatchLoader(inputs, targets, batch_size, shuffle=True, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay, fused=True)
    for epoch in range(epochs):
        for x, y in loader.batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("method", ["map", "vogn", "bbb", "sgld", "ensemble", "hypernet", "swag"])
def test_the_network_that_is_passed_stays_as_it_is(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    before, address = tb.snapshot(model), model[0].weight.data_ptr()
    hooks: list[int] = []
    model.register_forward_hook(lambda *_: hooks.append(1))
    run = tb.fit(model, blobs(), method, epochs=1, progress=False)
    assert run.model is not model
    assert hooks  # the copy has them too
    assert not model.training
    assert model[0].weight.grad is None
    assert model[0].weight.data_ptr() == address
    now = tb.snapshot(model)
    assert all(torch.equal(now[name], before[name]) for name in before)
    own = tb.fit(model, blobs(), method, epochs=1, in_place=True, progress=False)
    assert own.model is model
    same = zip(tb.snapshot(model).values(), tb.snapshot(run.model).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    made: list[nn.Module] = []
    factory = lambda: made.append(small_net()) or made[-1]  # noqa: E731
    assert tb.fit(factory, blobs(), method, epochs=1, progress=False).model is made[0]


def test_a_network_that_cannot_be_copied_is_named() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError("it holds a lock")

    with pytest.raises(
        ValueError, match=r"Locked cannot be copied \(it holds a lock\).*in_place=True"
    ):
        tb.fit(Locked(4, 3), blobs(), epochs=1, progress=False)
    locked = Locked(4, 3)
    assert tb.fit(locked, blobs(), epochs=1, in_place=True, progress=False).model is locked


def test_in_place_the_rest_is_trainable_again_afterwards() -> None:
    model = small_net()
    tb.fit(model, blobs(), epochs=1, params="2", in_place=True, progress=False)
    assert all(p.requires_grad for p in model.parameters())
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0\.weight' of params is frozen: set requires_grad"):
        tb.fit(model, blobs(), params="0.weight", progress=False)


def test_map_equals_an_ordinary_loop() -> None:
    model = made()
    twin = copy.deepcopy(model)
    model = tb.fit(model, blobs(), "map", epochs=3, batch_size=32, prior=2.0, progress=False).model
    by_hand(twin, 3, 32, decay=2.0 / 240)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_map_minimises_the_negative_log_posterior() -> None:
    """At the optimum the gradient of −log p(D|w) − log p(w) is zero; both terms from closed forms."""
    inputs, targets = blobs()
    model = tb.fit(
        nn.Linear(4, 3), (inputs, targets), "map", epochs=1500, batch_size=240, lr=0.05, prior=5.0,
        schedule="cosine", progress=False,
    ).model  # fmt: skip
    model.zero_grad()
    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    for parameter in model.parameters():
        energy_gradient = parameter.grad + 5.0 * parameter.detach()
        assert energy_gradient.abs().max() < 0.05  # against single terms of size 5 and more


def test_norm_layers_have_no_prior() -> None:
    """One step of plain SGD moves a weight by −lr·(gradient + δ/N·w), a norm's scale by −lr·gradient."""
    inputs, targets = blobs()
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    before = tb.snapshot(model)
    gradients = torch.autograd.grad(
        F.cross_entropy(model(inputs), targets), list(model.parameters())
    )
    model = tb.fit(
        model, (inputs, targets), "map", epochs=1, batch_size=240, optimizer="sgd", lr=0.1,
        momentum=0.0, prior=120.0, progress=False,
    ).model  # fmt: skip
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        decay = 0.0 if name.startswith("1.") else 120.0 / 240
        expected = before[name] - 0.1 * (gradient + decay * before[name])
        torch.testing.assert_close(parameter.detach(), expected)


def test_accumulation_and_clipping_equal_their_definitions() -> None:
    one, two = (
        tb.fit(made(), blobs(), "map", epochs=2, batch_size=60, accumulate=k, progress=False).model
        for k in (1, 4)
    )
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # With plain SGD a clipped step has exactly the clipped length.
    model = made()
    before = [p.detach().clone() for p in model.parameters()]
    model = tb.fit(
        model, blobs(), "mle", epochs=1, batch_size=240, optimizer="sgd", lr=1.0, momentum=0.0,
        clip_norm=1e-3, progress=False,
    ).model  # fmt: skip
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_regression_learns_the_noise_level() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=generator) * 4 - 2
    y = 2 * x + 1 + 0.3 * torch.randn(2000, 1, generator=generator)
    run = tb.fit(nn.Linear(1, 1), (x, y), "mle", epochs=60, batch_size=100, lr=0.02, progress=False)
    # The estimate of a standard deviation from n points has relative error 1/sqrt(2n) = 1.6 %.
    assert float(run.likelihood.std.detach()) == pytest.approx(0.3, rel=0.06)
    prediction = run.predict(x)
    assert float(prediction.std.mean()) == pytest.approx(0.3, rel=0.06)


def test_validation_scores_are_those_of_the_mean_network() -> None:
    inputs, targets = blobs()
    fresh = blobs(seed=1)
    run = tb.fit(made(), (inputs, targets), "map", epochs=2, validation=fresh, progress=False)
    outputs = run.model.eval()(fresh[0])
    assert run.history[-1]["validation_nll"] == pytest.approx(
        F.cross_entropy(outputs, fresh[1]).item(), rel=1e-5
    )
    accuracy = (outputs.argmax(1) == fresh[1]).float().mean().item()
    assert run.history[-1]["validation_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("method", ["swa", "swag", "hwa"])
def test_validation_scores_are_those_of_the_average_once_there_is_one(method: str) -> None:
    fresh = blobs(seed=1)
    run = tb.fit(made(), blobs(), method, epochs=4, validation=fresh, cycles=4, progress=False)
    outputs = torch.func.functional_call(made(), run.posterior.mean(), (fresh[0],))
    assert run.history[-1]["validation_nll"] == pytest.approx(
        F.cross_entropy(outputs, fresh[1]).item(), rel=1e-5
    )


def test_metrics_file_is_the_history(tmp_path: Path) -> None:
    run = tb.fit(made(), blobs(), "map", epochs=3, folder=tmp_path, progress=False)
    rows = RunFolder(tmp_path).read_metrics()
    assert rows == run.history
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_dict_batches_from_a_torch_data_set() -> None:
    inputs, targets = blobs()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return self.net(points)

    rows = [{"points": x, "label": y} for x, y in zip(inputs, targets, strict=True)]
    run = tb.fit(Named(), rows, "map", epochs=40, lr=0.01, progress=False)
    predicted = run.predict({"points": inputs}).prediction
    assert (predicted == targets).float().mean() > 0.9


class SpoilAt(nn.Module):
    """Turns its output into NaN from a given call on, as a diverging layer would."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.calls, self.at = 0, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x * float("nan") if self.calls > self.at else x


def test_nonfinite_loss_names_step_and_layer_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), SpoilAt(5), nn.Linear(8, 3))
    with (
        pytest.warns(UserWarning, match="goes back to the beginning of epoch 1"),
        pytest.raises(tb.TrainingError, match=r"step 0 .*not finite, layer '1'") as caught,
    ):
        tb.fit(
            model, blobs(), "map", epochs=2, batch_size=24, folder=tmp_path, checkpoint_seconds=0,
            progress=False,
        )  # fmt: skip
    assert caught.value.step == 0  # it is spoiled for good, so that going back did not help
    state = RunFolder(tmp_path).checkpoint.read()
    assert state is not None
    assert (state["epoch"], state["batch"]) == (0, 5)
    assert all(torch.isfinite(t).all() for t in state["method"]["module"].values())


def test_nonfinite_weights_are_never_checkpointed(tmp_path: Path) -> None:
    """An infinite step leaves a finite loss and broken weights: the checkpoint before it must stay."""

    class Blow(Progress):
        def __init__(self, model: nn.Module) -> None:
            self.model, self.steps = model, 0

        def start(self, name: str, total: int, done: int) -> None:
            pass

        def advance(self, loss: float) -> None:
            self.steps += 1
            if self.steps == 3:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = float("inf")

    model = small_net()
    with pytest.raises(tb.TrainingError, match=r"0\.weight"):
        tb.fit(
            model, blobs(), "map", epochs=2, folder=tmp_path, checkpoint_seconds=0,
            in_place=True, progress=Blow(model),
        )  # fmt: skip
    state = RunFolder(tmp_path).checkpoint.read()
    assert state is not None
    assert all(torch.isfinite(t).all() for t in state["method"]["module"].values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(
    number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Tests that were started by nohup ignore SIGHUP, and fit leaves an ignored signal ignored.
    request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.default_int_handler)

    class Interrupt(Progress):
        steps = 0

        def start(self, name: str, total: int, done: int) -> None:
            pass

        def advance(self, loss: float) -> None:
            self.steps += 1
            if self.steps == 4:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="resume=True"):
        tb.fit(
            small_net,
            blobs(),
            "map",
            epochs=2,
            batch_size=24,
            folder=tmp_path,
            progress=Interrupt(),
        )
    assert signal.getsignal(number) is before
    state = RunFolder(tmp_path).checkpoint.read()
    assert state is not None
    assert (state["epoch"], state["batch"]) == (0, 4)
    resumed = tb.fit(
        small_net, blobs(), "map", epochs=2, batch_size=24, folder=tmp_path, resume=True,
        progress=False,
    )  # fmt: skip
    whole = tb.fit(small_net, blobs(), "map", epochs=2, batch_size=24, progress=False)
    for name, tensor in whole.posterior.mean().items():
        assert torch.equal(tensor, resumed.posterior.mean()[name])


def test_a_folder_is_not_overwritten_or_mixed(tmp_path: Path) -> None:
    tb.fit(small_net, blobs(), "map", epochs=1, folder=tmp_path, progress=False)
    with pytest.raises(RunError, match="already holds a run"):
        tb.fit(small_net, blobs(), "map", epochs=1, folder=tmp_path, progress=False)
    with pytest.raises(RunError, match="method = 'map', not 'mle'"):
        tb.fit(small_net, blobs(), "mle", epochs=1, folder=tmp_path, resume=True, progress=False)
    wider = nn.Sequential(nn.Linear(4, 17), nn.ReLU(), nn.Linear(17, 3))
    with pytest.raises(RunError, match="another network"):
        tb.fit(wider, blobs(), "map", epochs=1, folder=tmp_path, resume=True, progress=False)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    tb.fit(small_net, blobs(), "map", epochs=1, folder=tmp_path, progress=False)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    (tmp_path / "checkpoint-previous.safetensors").unlink()
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged and there is no other"):
        tb.fit(small_net, blobs(), "map", epochs=1, folder=tmp_path, resume=True, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"clip_norm": 0.0}, "clip_norm is 0"),
        ({"amp": "float8"}, "amp is 'float8'"),
        ({"method": "mapp"}, "did you mean 'map'"),
        ({"learning_rate": 1.0}, "no option 'learning_rate'"),
        ({"lr": -1.0}, "lr is -1"),
        ({"prior": -1.0}, "prior is -1"),
        ({"schedule": "cosin"}, "schedule is 'cosin'"),
    ],
)
def test_bad_arguments_get_one_sentence(change: dict, message: str) -> None:
    arguments = {"method": "map", "epochs": 1, "progress": False, **change}
    with pytest.raises(ValueError, match=message) as caught:
        tb.fit(small_net, blobs(), **arguments)
    assert "\n" not in str(caught.value)


def test_bad_data_gets_one_sentence() -> None:
    inputs, targets = blobs()
    with pytest.raises(ValueError, match="label 3 is out of range: the network has 3 classes"):
        tb.fit(small_net, (inputs, targets + 1), "map", progress=False)
    with pytest.raises(ValueError, match=r"cannot take inputs of shape \(2, 3\)"):
        tb.fit(small_net, (inputs[:, :3], targets), "map", progress=False)
    with pytest.raises(ValueError, match="MSELoss is not a likelihood"):
        tb.fit(small_net, (inputs, targets), "map", likelihood=nn.MSELoss(), progress=False)
    with pytest.raises(TypeError, match="cannot train on a Tensor"):
        tb.fit(small_net, inputs, "map", progress=False)


def test_an_ensemble_of_a_network_without_a_factory_needs_resettable_layers() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    with pytest.raises(ValueError, match="pass fit a function that makes the network"):
        tb.fit(Own(), blobs(), "ensemble", epochs=1, progress=False)
    run = tb.fit(small_net(), blobs(), "ensemble", epochs=1, members=3, progress=False)
    first, second, _ = run.posterior
    assert not torch.equal(first["0.weight"], second["0.weight"])


def test_streamed_data_trains_and_resumes_like_data_in_memory(tmp_path: Path) -> None:
    """Image files read by worker processes with augmentation, stopped in the middle of an epoch."""
    from PIL import Image

    from torchbayes.data import load_data, make_loader

    pixels = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        file = tmp_path / "images" / "train" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
        if i < 4:
            other = tmp_path / "images" / "test" / "ab"[i % 2] / f"{i}.png"
            other.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(other)
    results = {}
    for stream in (False, True):
        data = load_data(f"folder:{tmp_path / 'images'}", size=8, stream=stream)

        def loader(data=data):
            return make_loader(data, data.train, 5, shuffle=True, augment=True, workers=2)

        def net() -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))

        settings = {"method": "map", "epochs": 3, "checkpoint_seconds": 0}
        folder = tmp_path / f"run-{stream}"
        with pytest.raises(Stopped):
            tb.fit(net, loader(), folder=folder, progress=StopAfter(7), **settings)
        run = tb.fit(net, loader(), folder=folder, resume=True, progress=False, **settings)
        results[stream] = run.posterior.mean()
    for name, tensor in results[False].items():
        assert torch.equal(tensor, results[True][name])


def test_a_checkpoint_of_an_older_version_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimiser's groups lack what a step needs now: that would be a KeyError in mid-training."""
    tb.fit(small_net, blobs(), "vogn", epochs=1, folder=tmp_path, progress=False)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_VERSION", checkpoint.CHECKPOINT_VERSION + 1)
    with pytest.raises(RunError, match="written by an older torchbayes"):
        tb.fit(small_net, blobs(), "vogn", epochs=1, folder=tmp_path, resume=True, progress=False)
