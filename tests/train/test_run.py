"""A run that is saved and loaded predicts the same, bit for bit, and says what it could not keep."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Exponential

import torchbayes as tb
from torchbayes.core.errors import FileError, PosteriorFileError, RunError
from torchbayes.data import Chain, Normalise, PadCropFlip
from torchbayes.train.run_folder import RunFolder

from ..conformance.problems import blobs, small_net

FAST: dict[str, Any] = {"epochs": 2, "batch_size": 64, "progress": False}


def curve(count: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=generator) * 4 - 2
    return x, x.sin() + 0.1 * torch.randn(count, 1, generator=generator)


def net(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("method", list(tb.METHODS))
def test_every_method_is_the_same_after_loading(method: str, tmp_path: Path) -> None:
    x, y = blobs()
    run = tb.fit(small_net, (x, y), method, **FAST)
    run.save(tmp_path / "run")
    again = tb.load_run(tmp_path / "run", small_net)
    before, after = (r.predict(x, 5, generator=seeded()) for r in (run, again))
    assert torch.equal(before.probs, after.probs)
    assert torch.equal(before.epistemic, after.epistemic)
    assert again.history == run.history
    assert again.method == method
    assert again.seconds == pytest.approx(run.seconds, abs=1e-3)
    assert isinstance(again.likelihood, tb.Categorical)


LIKELIHOODS = {
    "learned": ("tb.GaussianNoise(0.7, learned=True)", 1),
    "predicted": ("tb.GaussianNoise(predicted=True)", 2),
    "student": ("tb.StudentT(5.0, 0.4, learned=True, learned_df=True)", 1),
    "student predicted": ("tb.StudentT(3.0, predicted=True)", 2),
}


@pytest.mark.parametrize("method", ["vogn", "ensemble", "sgld"])
@pytest.mark.parametrize("kind", list(LIKELIHOODS))
def test_a_regression_keeps_its_noise(kind: str, method: str, tmp_path: Path) -> None:
    text, outputs = LIKELIHOODS[kind]
    likelihood = eval(text)
    x, y = curve()
    run = tb.fit(lambda: net(outputs), (x, y), method, likelihood=likelihood, **FAST)
    run.save(tmp_path / "run")
    again = tb.load_run(tmp_path / "run", net(outputs))
    for name, value in run.likelihood.state_dict().items():
        assert torch.equal(again.likelihood.state_dict()[name], value)
    before, after = (r.predict(x, 4, generator=seeded()) for r in (run, again))
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.std, after.std)
    assert torch.equal(before.quantile(0.9), after.quantile(0.9))


def test_an_ensemble_keeps_the_noise_level_that_its_members_share(tmp_path: Path) -> None:
    x, y = curve()
    noise = tb.GaussianNoise(learned=True)
    run = tb.fit(net, (x, y), "ensemble", members=3, likelihood=noise, folder=tmp_path, **FAST)
    ends = RunFolder(tmp_path).checkpoint.read()["noise"]["ends"]
    pooled = torch.stack([(2 * end["log_std"]).exp() for end in ends]).mean().sqrt()
    again = tb.load_run(tmp_path, net)
    assert len(ends) == 3
    torch.testing.assert_close(again.likelihood.std, pooled)
    assert torch.equal(again.likelihood.log_std, run.likelihood.log_std)


def test_a_new_process_predicts_the_same_bits(tmp_path: Path) -> None:
    """Figures are exchanged as hexadecimal numbers: nothing of them is rounded."""
    script = """
        import sys, torch, torchbayes as tb
        from torch import nn
        outputs = int(sys.argv[2])
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs))
        run = tb.load_run(sys.argv[1], net)
        p = run.predict(torch.linspace(-3, 3, 40)[:, None], 6, generator=torch.Generator().manual_seed(3))
        for values in (p.mean, p.std, p.quantile(0.05), p.quantile(0.95)):
            print(" ".join(v.hex() for v in values.flatten().tolist()))
    """
    x, y = curve()
    for number, (text, outputs) in enumerate(LIKELIHOODS.values()):
        folder = tmp_path / str(number)
        run = tb.fit(lambda n=outputs: net(n), (x, y), "vogn", likelihood=eval(text), **FAST)
        run.save(folder)
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(folder), str(outputs)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        p = run.predict(torch.linspace(-3, 3, 40)[:, None], 6, generator=seeded())
        expected = [p.mean, p.std, p.quantile(0.05), p.quantile(0.95)]
        assert said.splitlines() == [
            " ".join(v.hex() for v in values.flatten().tolist()) for values in expected
        ]


@pytest.mark.parametrize(
    "likelihood",
    [
        tb.Categorical(ignore_index=7, class_weight=[1.0, 2.0, 0.5]),
        tb.Bernoulli(positive_weight=[3.0, 1.0, 1.0]),
        tb.Poisson(),
    ],
)
def test_other_likelihoods_are_the_same(likelihood: tb.Likelihood, tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    files.write_likelihood(likelihood)
    again = files.read_likelihood()
    assert type(again) is type(likelihood)
    outputs = torch.randn(5, 3, generator=seeded())
    targets = torch.tensor([0, 1, 2, 1, 0])
    if not isinstance(likelihood, tb.Categorical):
        targets = (outputs > 0).float()
    assert torch.equal(again.loss(outputs, targets), likelihood.loss(outputs, targets))
    assert getattr(again, "ignore_index", None) == getattr(likelihood, "ignore_index", None)


def test_a_bank_on_disk_is_part_of_it(tmp_path: Path) -> None:
    x, y = blobs()
    bank = str(tmp_path / "bank")
    run = tb.fit(small_net, (x, y), "sgld", sample_folder=bank, samples=4, **FAST)
    run.save(tmp_path / "run")
    expected = run.predict(x).probs
    (tmp_path / "bank").rename(tmp_path / "gone")
    assert torch.equal(tb.load_run(tmp_path / "run", small_net).predict(x).probs, expected)


class Tempered(tb.GaussianNoise):
    """A likelihood of a user's own."""


@pytest.mark.parametrize("own", [Tempered(0.3, learned=True), lambda out: Exponential(out.exp())])
def test_a_likelihood_of_ones_own_is_asked_for(own: Any, tmp_path: Path) -> None:
    x, y = curve()
    run = tb.fit(net, (x, y.exp()), "map", likelihood=own, folder=tmp_path, **FAST)
    with pytest.raises(RunError, match="which a file cannot hold: pass it, as in load_run"):
        tb.load_run(tmp_path, net())
    fresh = Tempered(1.0, learned=True) if isinstance(own, tb.Likelihood) else own
    again = tb.load_run(tmp_path, net(), likelihood=fresh)
    assert torch.equal(run.predict(x).std, again.predict(x).std)
    if isinstance(own, tb.Likelihood):
        assert again.likelihood is fresh
        with pytest.raises(FileError, match="does not fit Poisson"):
            tb.load_run(tmp_path, net(), likelihood=tb.Poisson())


def test_frozen_weights_are_part_of_it_and_the_network_is_not_changed(tmp_path: Path) -> None:
    x, y = blobs()
    model = small_net()
    run = tb.fit(model, (x, y), "vogn", params="2.*", **FAST)
    run.save(tmp_path / "run")
    other = small_net()  # with random weights of its own
    before = tb.snapshot(other)
    again = tb.load_run(tmp_path / "run", other)
    first, second = (r.predict(x, 5, generator=seeded()) for r in (run, again))
    assert torch.equal(first.probs, second.probs)
    assert all(torch.equal(before[name], w) for name, w in tb.snapshot(other).items())
    assert torch.equal(again.model[0].weight, model[0].weight)


def test_normalisation_is_part_of_it(tmp_path: Path) -> None:
    x, y = blobs()
    raw = 50 + 20 * x
    scale = Normalise((50.0,) * 4, (20.0,) * 4)
    run = tb.fit(small_net, (raw, y), "vogn", transform=scale, **FAST)
    by_hand = tb.predictive(
        run.model, run.posterior, (raw - 50) / 20, 5, generator=seeded(), recalibrate=False
    )
    torch.testing.assert_close(run.predict(raw, 5, generator=seeded()).probs, by_hand.probs)
    run.save(tmp_path / "run")
    again = tb.load_run(tmp_path / "run", small_net)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(raw, y), 100)
    expected = run.predict(raw, 5, generator=seeded()).probs
    for inputs in (raw, raw.numpy(), loader):
        found = again.predict(inputs, 5, generator=seeded()).probs
        torch.testing.assert_close(found, expected)
    assert tb.data.Preprocessing.of(Chain(PadCropFlip(), scale)).normalise == scale
    with pytest.raises(TypeError, match="takes a tensor or a loader of them, not a tuple"):
        again.predict((raw, raw))


def test_a_function_cannot_be_kept_and_is_named(tmp_path: Path) -> None:
    def halved(x: Tensor, generator: torch.Generator) -> Tensor:
        return x / 2

    def first(outputs: Any) -> Tensor:
        return outputs[0]

    class Pair(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y

    def make() -> Pair:
        return Pair(*small_net())

    x, y = blobs()
    run = tb.fit(make, (x, y), "map", transform=halved, output=first, folder=tmp_path, **FAST)
    with (
        pytest.warns(UserWarning, match="trained with transform=halved, which a folder cannot"),
        pytest.raises(RunError, match=r"function 'first' as output, .*: pass output="),
    ):
        tb.load_run(tmp_path, make)
    with pytest.warns(UserWarning, match="halved"):
        again = tb.load_run(tmp_path, make, output=first)
    assert torch.equal(again.predict(x / 2).probs, run.predict(x / 2).probs)
    run = tb.fit(make, (x, y), "map", output=1, folder=tmp_path / "index", **FAST)
    again = tb.load_run(tmp_path / "index", make)
    assert again.output == 1
    assert torch.equal(again.predict(x).probs, run.predict(x).probs)


def test_calibration_is_part_of_it(tmp_path: Path) -> None:
    x, y = blobs(600)
    noisy = torch.where(
        torch.arange(600) % 3 == 0, (y + 1) % 3, y
    )  # a third of the labels is wrong
    run = tb.fit(small_net, (x[:200], y[:200]), "mle", lr=0.1, epochs=20, progress=False)
    found = run.calibrate(x[200:], noisy[200:])
    raw, scaled = run.predict(x, calibrated=False), run.predict(x)
    assert torch.equal(scaled.probs, found.temperature(raw).probs)
    assert tb.metrics.nll(scaled.probs, noisy) < tb.metrics.nll(raw.probs, noisy)
    run.save(tmp_path / "run")
    again = tb.load_run(tmp_path / "run", small_net)
    assert torch.equal(again.predict(x).probs, scaled.probs)
    assert torch.equal(again.predict(x, calibrated=False).probs, raw.probs)
    for target in (0.8, 0.9, 0.95):
        assert torch.equal(again.calibration.sets[target](raw), found.sets[target](raw))
    for risk in (0.01, 0.02, 0.05):
        assert torch.equal(again.calibration.abstention[risk](raw), found.abstention[risk](raw))
    config = RunFolder(tmp_path / "run").read_config()
    RunFolder(tmp_path / "run").write_config(config | {"epochs": 21})
    assert tb.load_run(tmp_path / "run", small_net).calibration is None


def test_intervals_are_part_of_it(tmp_path: Path) -> None:
    x, y = curve(400)
    run = tb.fit(net, (x[:100], y[:100]), "map", likelihood=tb.GaussianNoise(0.01), **FAST)
    found = run.calibrate(x[100:], y[100:])
    run.save(tmp_path / "run")
    again = tb.load_run(tmp_path / "run", net())
    low, high = again.calibration.intervals[0.9](again.predict(x))
    assert torch.equal(low, found.intervals[0.9](run.predict(x))[0])
    assert 0.85 < float(((low <= y) & (y <= high)).double().mean()) < 0.95


def test_a_temperature_that_makes_it_worse_is_said_and_not_used() -> None:
    """The fitted half is labelled as the network says, the scored one is not: no temperature helps."""
    probs = torch.tensor([[0.7, 0.3]]).repeat(40, 1)
    raw = tb.ClassPredictive(probs, torch.zeros(40), 1)
    right, wrong = torch.zeros(40).long(), torch.tensor([0, 1] * 20)
    found = tb.posthoc.calibrate(raw, right, raw, wrong)
    assert found.temperature is None
    assert found(raw) is raw
    assert "makes the NLL on the held-out part worse" in found.warning


def test_intervals_that_became_worse_are_said() -> None:
    """Fitted to targets without noise, scored on those that the prediction says."""
    p = tb.GaussianNoise(1.0).predictive(torch.zeros(1, 400, 1))
    y = torch.linspace(0.5 / 400, 1 - 0.5 / 400, 400).mul(2).sub(1).erfinv().mul(2**0.5)
    assert tb.posthoc.calibrate(p, y, p, y).warning is None
    found = tb.posthoc.calibrate(p, 0.01 * y, p, y)
    assert "the corrected intervals for 80% contain" in found.warning
    assert "the posterior's own 80" in found.warning


def test_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    x, y = blobs()
    run = tb.fit(small_net, (x, y), "map", folder=tmp_path / "run", **FAST)
    with pytest.raises(PosteriorFileError, match=r"is a run folder: torchbayes.load_run\(folder"):
        tb.load(tmp_path / "run")
    with pytest.raises(RunError, match="does not say how its Sequential is built: pass it"):
        tb.load_run(tmp_path / "run")
    with pytest.raises(PosteriorFileError, match="does not fit the model"):
        tb.load_run(tmp_path / "run", nn.Linear(4, 3))
    with pytest.raises(RunError, match="is not a run folder"):
        tb.load_run(tmp_path / "nothing", small_net)
    run.save(tmp_path / "run")  # its own
    run.save(tmp_path / "other")
    again = tb.fit(small_net, (x, y), "map", **FAST)
    with pytest.raises(RunError, match="already holds a run: choose another folder"):
        again.save(tmp_path / "run")
    with pytest.raises(RunError, match="no checkpoint to continue from: load it with load_run"):
        tb.fit(small_net, (x, y), "map", folder=tmp_path / "other", resume=True, **FAST)
    (tmp_path / "other" / "posterior.safetensors").unlink()
    with pytest.raises(RunError, match="finish the run with resume=True"):
        tb.load_run(tmp_path / "other", small_net)


@pytest.mark.parametrize("name", ["likelihood.safetensors", "inputs.json", "posterior.safetensors"])
def test_damage_is_noticed(name: str, tmp_path: Path) -> None:
    x, y = curve()
    tb.fit(net, (x, y), "map", folder=tmp_path, **FAST)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(bytes(content))
    with pytest.raises(FileError, match=r"damaged|cannot be read|edited|not text"):
        tb.load_run(tmp_path, net())
