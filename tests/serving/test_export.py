"""Files of `torchbayes.serving.export` against predictions that are computed without them."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.data.transform import Normalise
from torchbayes.posthoc import TemperatureScaling
from torchbayes.serving import export

FORMATS = ("onnx", "pt2")


class Transformer(nn.Module):
    """Classes of sequences of tokens; its own dropout is off unless a posterior turns it on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


def gaussian(model: nn.Module, std: float = 0.05) -> tb.Gaussian:
    spread = {name: torch.full_like(p, std) for name, p in model.named_parameters()}
    return tb.Gaussian(tb.snapshot(model), spread)


def run_file(path: Path, inputs: Any) -> dict[str, Tensor]:
    """Run a file as somebody without torchbayes would."""
    if path.suffix == ".pt2":
        loaded: dict[str, Tensor] = torch.export.load(path).module()(inputs)
        return loaded
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    names = [output.name for output in session.get_outputs()]
    given = session.run(names, {name: tensor.numpy() for name, tensor in fed.items()})
    return {name: torch.from_numpy(array) for name, array in zip(names, given, strict=True)}


def assert_agrees(given: dict[str, Tensor], wanted: tb.Predictive) -> None:
    names = {"probabilities": "probs"}
    for name, tensor in given.items():
        truth = getattr(wanted, names.get(name, name))
        torch.testing.assert_close(tensor, truth.to(tensor.dtype), atol=1e-5, rtol=1e-5)


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    if name == "lenet5":
        return tb.models.lenet5(in_channels=1, image_size=28), torch.randn(7, 1, 28, 28)
    if name == "resnet":
        model = tb.models.resnet8()
        model.train()(torch.randn(8, 3, 32, 32))  # statistics of batch norm that are not 0 and 1
        return model, torch.randn(7, 3, 32, 32)
    return Transformer(), torch.randint(20, (7, 5))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["lenet5", "resnet", "transformer"])
def test_files_agree_with_predictive_and_with_networks_that_hold_the_draws(
    name: str, format: str, tmp_path: Path
) -> None:
    model, inputs = network(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    q, path = gaussian(model), tmp_path / f"model.{format}"
    seed = torch.Generator().manual_seed(5)
    file = export(model, q, inputs[:5], path, 3, generator=seed, recalibrate=False)
    assert file.outputs == ("probabilities", "entropy", "aleatoric", "epistemic")
    assert file.difference < 1e-5
    given = run_file(path, inputs)  # another number of examples than the file was made with
    seed = torch.Generator().manual_seed(5)
    assert_agrees(given, tb.predictive(model, q, inputs, 3, generator=seed, recalibrate=False))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())

    seed, model = torch.Generator().manual_seed(5), model.eval()
    probs = []
    for _ in range(3):
        model.load_state_dict(q.sample(seed))
        probs.append(model(inputs).softmax(1).detach())
    torch.testing.assert_close(given["probabilities"], sum(probs) / 3, atol=1e-5, rtol=0)
    alone = run_file(path, inputs[:1])
    torch.testing.assert_close(
        alone["probabilities"], given["probabilities"][:1], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_regression_has_the_mean_and_the_std_of_the_mixture(format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(6, 3)
    q = gaussian(model, 0.5)
    path, seed = tmp_path / f"line.{format}", torch.Generator().manual_seed(1)
    export(model, q, inputs, path, 4, tb.GaussianNoise(0.3), seed)
    given = run_file(path, inputs)
    seed = torch.Generator().manual_seed(1)
    draws = [{k: t.double().numpy() for k, t in q.sample(seed).items()} for _ in range(4)]
    x = inputs.double().numpy()
    means = np.stack([x @ draw["weight"].T + draw["bias"] for draw in draws])
    np.testing.assert_allclose(given["mean"].numpy(), means.mean(0), atol=1e-5)
    np.testing.assert_allclose(given["epistemic"].numpy(), means.std(0), atol=1e-5)
    np.testing.assert_allclose(given["aleatoric"].numpy(), 0.3, atol=1e-6)
    np.testing.assert_allclose(given["std"].numpy(), np.sqrt(means.var(0) + 0.09), atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_the_masks_of_dropout_become_part_of_the_file(own: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = (
        Transformer() if own else nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    )
    inputs = torch.randint(20, (4, 5)) if own else torch.randn(4, 4)
    net = tb.MCDropout(model) if own else tb.MCDropout(model, p=0.5)
    q, path = net.posterior(), tmp_path / "dropped.pt2"
    export(net, q, inputs, path, 4, generator=torch.Generator().manual_seed(2))
    wanted = tb.predictive(net, q, inputs, 4, generator=torch.Generator().manual_seed(2))
    assert float(wanted.epistemic.max()) > 1e-3
    assert_agrees(run_file(path, inputs), wanted)


def test_draws_of_a_hypernetwork_and_the_members_of_an_ensemble(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 4)
    net = tb.Hypernet(tb.models.mlp(4, hidden=(8, 8)))
    seed = torch.Generator().manual_seed(2)
    export(net, net.posterior(), inputs, tmp_path / "hyper.pt2", 4, generator=seed)
    seed = torch.Generator().manual_seed(2)
    wanted = tb.predictive(net, net.posterior(), inputs, 4, generator=seed)
    assert_agrees(run_file(tmp_path / "hyper.pt2", inputs), wanted)

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    members = tb.Samples(model)
    for _ in range(3):
        model.train()(torch.randn(9, 4) * 3)
        with torch.no_grad():
            model[0].weight.normal_()
        members.append()
    file = export(model, members, inputs, tmp_path / "ensemble.pt2", 32)
    assert file.draws == 3
    assert_agrees(run_file(file.path, inputs), tb.predictive(model, members, inputs))


def test_what_happens_before_and_after_the_network_is_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    raw, normalise = torch.rand(5, 3, 2, 2), Normalise((0.2, 0.5, 0.8), (0.3, 0.2, 0.1))
    q, after = gaussian(model, 0.3), TemperatureScaling(2.5)
    path, seed = tmp_path / "model.onnx", torch.Generator().manual_seed(1)
    file = export(
        model, q, raw, path, 3, generator=seed, before=normalise, after=after, about={"classes": ["a"]}
    )  # fmt: skip
    assert file.about["classes"] == ["a"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (normalise.mean, normalise.std))
    seed = torch.Generator().manual_seed(1)
    plain = tb.predictive(model, q, (raw - mean) / std, 3, generator=seed)
    assert isinstance(plain, tb.ClassPredictive)
    given = run_file(path, raw)
    powers = plain.probs.double() ** (1 / 2.5)
    truth = (powers / powers.sum(1, keepdim=True)).float()
    torch.testing.assert_close(given["probabilities"], truth, atol=1e-5, rtol=0)


def test_inputs_by_name_and_an_output_of_several(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x)
            return {"logits": self.head(hidden) + shift, "hidden": hidden}

    torch.manual_seed(0)
    model, inputs = Two(), {"x": torch.randn(4, 3), "shift": torch.randn(4, 2)}
    q = gaussian(model)
    file = export(
        model, q, inputs, tmp_path / "two.onnx", 2, generator=torch.Generator().manual_seed(0)
    )
    assert file.inputs == ("x", "shift")
    wanted = tb.predictive(model, q, inputs, 2, generator=torch.Generator().manual_seed(0))
    assert_agrees(run_file(file.path, inputs), wanted)


def test_a_file_describes_itself_and_keeps_neither_examples_nor_paths(tmp_path: Path) -> None:
    model, secret = nn.Linear(4, 3), torch.full((5, 4), 1234.5678)
    needle = secret[0].numpy().tobytes()
    for format in FORMATS:
        path = tmp_path / f"model.{format}"
        export(model, gaussian(model), secret, path, 2, about={"classes": ["x", "y", "z"]})
        if format == "onnx":
            contents, proto = [path.read_bytes()], onnx.load(path)
            (about,) = (p.value for p in proto.metadata_props if p.key == "torchbayes")
            assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        else:
            with zipfile.ZipFile(path) as archive:
                contents = [archive.read(name) for name in archive.namelist()]
            extra = {"torchbayes.json": ""}
            torch.export.load(path, extra_files=extra)
            about = extra["torchbayes.json"]
        found = json.loads(about)
        assert found["classes"] == ["x", "y", "z"]
        assert (found["model"], found["posterior"], found["draws"]) == ("Linear", "Gaussian", 2)
        for content in contents:
            assert needle not in content
            assert str(Path(__file__).parents[2]).encode() not in content


def test_weights_that_no_draw_changes_are_held_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3))
    q = tb.Gaussian(tb.snapshot(model), {"2.weight": torch.full((3, 100), 0.1)})
    file = export(model, q, torch.randn(2, 100), tmp_path / "last.pt2", 16)
    assert file.path.stat().st_size < 4 * 4 * 100 * 100


class Undecided(nn.Linear):
    """A network that torch.export cannot take: what it does depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class Counting(nn.Linear):
    """Another one: what it does depends on the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Undecided, "the values of a tensor"), (Counting, "the number of examples")],
)
def test_a_model_that_cannot_be_exported_is_refused_in_one_sentence(
    kind: type[nn.Linear], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, path = kind(4, 3), tmp_path / "model.pt2"
    path.write_bytes(b"what was there before")
    with pytest.raises(
        ValueError, match=f"torch.export cannot take {kind.__name__} .*{reason}"
    ) as refusal:
        export(model, gaussian(model), torch.randn(3, 4), path, 2)
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == b"what was there before"
    assert capfd.readouterr() == ("", "")


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Linear(4, 3), torch.randn(3, 4)
    q = gaussian(model)
    with pytest.raises(ValueError, match=r"ends in '\.bin': expected onnx or pt2"):
        export(model, q, inputs, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="format is 'tflite': expected onnx or pt2"):
        export(model, q, inputs, tmp_path / "model.onnx", format="tflite")
    with pytest.raises(ValueError, match="samples is 0"):
        export(model, q, inputs, tmp_path / "model.onnx", 0)
    with pytest.raises(ValueError, match="no examples"):
        export(model, q, inputs[:0], tmp_path / "model.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript.*pip install 'torchbayes\[export\]'"):
        export(model, q, inputs, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
