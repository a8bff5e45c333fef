"""Every registered method trains, resumes, draws, is saved and loaded, and predicts on an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchbayes as tb

from ..conformance.problems import ODD_MODULES, blobs, small_net
from ..conformance.test_methods import assert_equal, every_method, tensors
from ..stopping import StopAfter, Stopped


@every_method
def test_a_run_and_its_predictions(
    method: str, device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torchbayes")
    data = blobs(32)
    settings = {"epochs": 2, "batch_size": 16, "checkpoint_seconds": 0, "device": device}
    run = tb.fit(small_net, data, method, progress=False, folder=tmp_path / "a", **settings)
    with pytest.raises(Stopped):
        tb.fit(small_net, data, method, folder=tmp_path / "b", progress=StopAfter(3), **settings)
    assert "could not be checked" not in caplog.text
    resumed = tb.fit(
        small_net, data, method, folder=tmp_path / "b", resume=True, progress=False, **settings
    )
    assert all(tensor.device == device for tensor in tensors(run.posterior).values())
    assert_equal(run.posterior, resumed.posterior)
    loaded = tb.load(tmp_path / "a" / "posterior.safetensors", run.model)
    for source in (None, device, "cpu"):
        generator = None if source is None else torch.Generator(source).manual_seed(0)
        draw = run.posterior.sample(generator)
        for name, _ in run.model.named_parameters():
            assert draw[name].device == device, name
    inputs = blobs(8)[0]
    one, two = (
        tb.predictive(run.model, q, x, 3, generator=torch.Generator().manual_seed(1))
        for q, x in ((run.posterior, inputs), (loaded, inputs.to(device)))
    )
    assert one.probs.device == device
    assert torch.equal(one.probs, two.probs)
    assert tb.Predictor(run.model, loaded, samples=2)(inputs).probs.device == device


SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"amp": "bfloat16"},
    "float16": {"amp": "float16"},
    "channels last": {"memory_format": "channels_last"},
    "compiled": {"compile": "eager"},
}


@pytest.mark.parametrize("method", ["bbb", "map", "noisy-kfac", "sgld", "vogn"])
@pytest.mark.parametrize("what", SETTINGS)
def test_throughput(method: str, what: str, device: torch.device) -> None:
    """Mixed precision, which converts nothing here, memory formats and compiled networks."""
    make, data = (small_net, blobs) if "amp" in SETTINGS[what] else ODD_MODULES["convolutions"]
    run = tb.fit(
        make,
        data(16),
        method,
        epochs=1,
        batch_size=8,
        device=device,
        progress=False,
        **SETTINGS[what],
    )
    probs = run.predict(data(4)[0], samples=2).probs
    assert probs.device == device
    torch.testing.assert_close(probs.sum(1).cpu(), torch.ones(4))


@pytest.mark.parametrize("method", ["bbb", "ivon", "kfac", "laplace", "noisy-kfac", "vogn"])
@pytest.mark.parametrize("module", ["convolutions", "attention"])
def test_layers(method: str, module: str, device: torch.device) -> None:
    """What has rules of its own for layers finds its tensors on the device."""
    make, data = ODD_MODULES[module]
    run = tb.fit(make, data(16), method, epochs=1, batch_size=8, device=device, progress=False)
    probs = run.predict(data(4)[0], samples=2).probs
    assert probs.device == device
    torch.testing.assert_close(probs.sum(1).cpu(), torch.ones(4))


def test_random_layers_are_not_shared_by_draws(device: torch.device) -> None:
    """Random numbers of the device, too, differ from draw to draw."""

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.dropout(self.body(x), 0.5, training=True))

    model = Noisy().to(device)
    mean = tb.snapshot(model)
    std = {name: 1e-5 * torch.ones_like(w) for name, w in mean.items() if name.startswith("head")}
    q = tb.Gaussian(mean, std)
    p = tb.predictive(model, q, torch.ones(3, 4), samples=8, likelihood=tb.GaussianNoise())
    assert len({tuple(row) for row in p.outputs[:, 0].mul(100).round().tolist()}) > 2
