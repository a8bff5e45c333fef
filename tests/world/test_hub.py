"""A folder for the Hub: loads as the run that it is, and its card is what huggingface_hub reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.core.errors import RunError
from torchbayes.integrations.hub import export

from ..cli.conftest import run as run  # the command line in this process

hub = pytest.importorskip("huggingface_hub")

HOSTILE = [
    'x"\n---\nlicense: mit\n---\n',
    "</code><script>alert(1)</script>",
    "[click](javascript:alert(1)) ![i](http://x/y.png)",
    "a|b `c` *d* _e_ ```\n# title",
    "\u2028\ufeff\x07 ü 漢 😀 \udc80",
    "{a: [b, !!python/object:c]} & *anchor: ' #",
]


def classes(size: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def network(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))


def fitted(method: str = "ivon", **options: Any) -> tb.Run:
    return tb.fit(network, classes(), method, epochs=2, progress=False, **options)


def metadata(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = hub.ModelCard.load(folder / "README.md").data.to_dict()
    return data


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("method", ["ivon", "sgld", "ensemble", "swag", "hypernet", "map"])
def test_the_folder_is_the_run(method: str, tmp_path: Path) -> None:
    made = fitted(method)
    before = dataclasses.replace(made)
    card = export(made, tmp_path / "hub")
    assert made == before  # the user's run is as it was
    loaded = tb.load_run(tmp_path / "hub", network())
    x = classes()[0]
    one, two = (r.predict(x, 4, generator=seeded()).probs for r in (made, loaded))
    assert torch.equal(one, two)
    assert not list((tmp_path / "hub").glob("checkpoint*"))
    assert not (tmp_path / "hub" / ".lock").exists()
    assert metadata(tmp_path / "hub") == {
        "library_name": "torchbayes",
        "tags": ["torchbayes", "bayesian", "uncertainty-quantification", method],
    }
    text = card.read_text(encoding="utf-8")
    assert ("It is one network" in text) == (method == "map")
    assert 'tb.load_run(snapshot_download("hub"), model)' in text


def test_a_regression_with_its_noise_and_calibration(tmp_path: Path) -> None:
    x, _ = classes()
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, generator=seeded())
    made = tb.fit(lambda: network(1), (x[:40], y[:40]), "ivon", epochs=5, progress=False)
    made.calibrate(x[40:], y[40:])
    export(made, tmp_path / "hub", scores={"rmse": 0.25, "nll": 1e-7, "crps": float("nan")})
    loaded = tb.load_run(tmp_path / "hub", network(1))
    assert loaded.calibration is not None
    for q in (0.1, 0.9):
        one, two = (r.predict(x, generator=seeded()).quantile(q) for r in (made, loaded))
        assert torch.equal(one, two)
    (result,) = metadata(tmp_path / "hub")["model-index"][0]["results"]
    assert result["task"] == {"type": "regression"}
    assert result["metrics"] == [
        {"type": "rmse", "value": 0.25}, {"type": "nll", "value": 1e-7},
    ]  # fmt: skip
    text = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    assert "from before the calibration" in text
    assert "p.quantile" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown")
    made = fitted()
    made.preprocessing = dataclasses.replace(made.preprocessing, classes=(name, "b"), unknown=name)
    made.settings |= {"data": name, "options": {"lr": name}}
    made.method = name
    plain = name.encode("utf-8", "replace").decode()
    card = export(
        made, tmp_path / "hub", name=name, license=name, scores={"accuracy": 0.5, name: 1.0}
    )
    data = metadata(tmp_path / "hub")
    assert data["license"] == plain
    assert data["tags"][-1] == plain
    assert data["model-index"][0]["name"] == plain
    assert data["model-index"][0]["results"][0]["dataset"]["name"] == plain
    assert data["metrics"] == ["accuracy", plain]
    body = hub.ModelCard.load(card).text
    page = markdown.markdown(body, extensions=["tables", "fenced_code"])
    for forbidden in ("<script", "<img", "<em>", "<strong>", 'href="javascript', "<h1>title"):
        assert forbidden not in page
    assert page.count("<h1>") == 1
    assert page.count("<a href") == 1  # to torchbayes
    assert page.count("<table>") == 2
    code = body.split("```python\n")[1].split("\n```")[0].splitlines()
    compile("\n".join(line for line in code if not line.startswith("model =")), "card", "exec")


def test_paths_of_this_machine_are_left_out(tmp_path: Path) -> None:
    made = fitted()
    made.settings |= {
        "data": "table:/home/me/secret/things.csv", "init": ["/home/me/net.safetensors"],
        "other": {"folder": r"C:\\Users\\me\\x", "url": "uci:yacht", "ratio": "1/2", "home": "~/y.csv"},
    }  # fmt: skip
    export(made, tmp_path / "hub")
    kept = tb.load_run(tmp_path / "hub", network()).settings
    assert kept["data"] == "table:things.csv"
    assert kept["init"] == ["net.safetensors"]
    assert kept["other"] == {"folder": "x", "url": "uci:yacht", "ratio": "1/2", "home": "y.csv"}
    for file in (tmp_path / "hub").iterdir():
        assert b"/home/me" not in file.read_bytes()
        assert str(tmp_path).encode() not in file.read_bytes()


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(RunError, match="is not an empty folder"):
        export(fitted(), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_command_line(run: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "hub"
    words = ["--data", "digits", "--model", "mlp", "--model-set", "hidden=[16]", "--epochs", "2"]
    code, _, err = run("hub", tmp_path / "none", "--out", out)
    assert code == 2
    assert "is not a run folder" in err
    assert run("train", *words, "--method", "ivon", "--out", folder)[0] == 0
    code, text, err = run(
        "hub", folder, "--out", out, "--name", "you/digits", "--license", "mit", "--json"
    )
    assert code == 0, err
    assert json.loads(text)["files"] == [
        "README.md", "config.toml", "inputs.json", "likelihood.safetensors", "metrics.jsonl",
        "posterior.safetensors",
    ]  # fmt: skip
    data = metadata(out)
    assert (data["pipeline_tag"], data["license"]) == ("image-classification", "mit")
    scores = json.loads((folder / "scores.json").read_text())
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"]["name"] == "digits"
    found = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert found["accuracy"] == pytest.approx(scores["accuracy"], rel=1e-5)
    assert found.keys() >= {"accuracy", "nll", "ece", "brier", "auroc_ood"}
    assert "takes image files too" in (out / "README.md").read_text(encoding="utf-8")
    # Five lines load it, without a model: the folder names its network.
    inputs = tb.load_data("digits").test.inputs
    loaded, original = tb.load_run(out), tb.load_run(folder)
    one, two = (r.predict(inputs, 4, generator=seeded()).probs for r in (loaded, original))
    assert torch.equal(one, two)
    code, _, err = run("hub", folder, "--out", out)
    assert code == 2
    assert "is not an empty folder" in err


def test_a_table_is_predicted_from_its_file(run: Any, tmp_path: Path) -> None:
    table, out = tmp_path / "th<b>ings.csv", tmp_path / "hub"
    rows = (f"{i % 7},{'red' if i % 3 else 'b|ue'},{i % 7 + i / 64}\n" for i in range(60))
    table.write_text("size,<script>,price\n" + "".join(rows))
    words = ["train", "--data", f"table:{table}", "--target", "price", "--epochs", "1"]
    assert run(*words, "--out", tmp_path / "run")[0] == 0
    assert run("hub", tmp_path / "run", "--out", out)[0] == 0
    assert metadata(out)["pipeline_tag"] == "tabular-regression"
    assert metadata(out)["model-index"][0]["results"][0]["dataset"]["name"] == "table:th<b>ings.csv"
    text = (out / "README.md").read_text(encoding="utf-8").split("---")[2]
    assert "columns size, &#60;script&#62;, and predicts price." in text
    assert "<script" not in text
    one, two = (
        tb.load_run(f).predict(table, 4, generator=seeded()) for f in (out, tmp_path / "run")
    )
    assert torch.equal(one.mean, two.mean)
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in out.iterdir())


def test_scores_of_other_settings_are_left_out(run: Any, tmp_path: Path) -> None:
    made = fitted(folder=tmp_path / "run")
    (tmp_path / "run" / "scores.json").write_text(
        '{"accuracy": 0.9, "made_with": {"run": "other"}}'
    )
    export(made, tmp_path / "hub")
    assert "metrics" not in metadata(tmp_path / "hub")
