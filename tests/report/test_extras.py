"""Optional files of run folders: shown, skipped if missing, named if damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from torchbayes.report import load_results, write_report
from torchbayes.report.attach import save_picture
from torchbayes.report.sections import notices

from .folders import write_folder
from .parsing import Page

RED = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><script>alert(1)</script></svg>'


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_draws(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {}, "bbb": {}}, seeds=(0, 1), extras=True))
    section = page.id("draws")
    assert section is not None
    names = [svg.attributes["aria-label"] for svg in section.all("svg", role="img")]
    scores = [run.scores["nll"] for run in load_results(tmp_path).methods[0].runs]
    last = sum(score * (1 + 0.3 / 8) for score in scores if score is not None) / 2
    assert f"{last:.3f} with 8" in names[0]
    # 1 + 0.3 / n is within 2 % of 1 + 0.3 / 8 from n = 8 on.
    assert "bbb 8 map 8" in section.text


def test_corruptions(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {}, "bbb": {}}, extras=True))
    section = page.id("shift")
    assert section is not None
    assert "Corruptions are generated. 160 test images of each." in section.text
    assert not section.all("i")
    assert any(
        "<i>new</i>" in svg.attributes["aria-label"] for svg in section.all("svg", role="img")
    )
    accuracy = load_results(tmp_path).methods[0].scores["accuracy"]
    assert accuracy is not None
    cells = [cell.text for cell in section.all("tbody")[0].children[0].all("td")]
    assert cells[:2] == [f"{100 * accuracy:.1f} %", f"{50 * accuracy:.1f} %"]


def test_before_and_after(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path, {"map": {}}, extras=True))
    section = page.id("afterwards")
    assert section is not None
    ece = load_results(tmp_path).methods[0].scores["ece"]
    assert ece is not None
    scaled, sets, refusals = (body.children[0].text for body in section.all("tbody"))
    assert scaled.startswith("map 1.50") or scaled.startswith("map1.50")
    assert f"{ece:.4f}" in scaled
    assert f"{ece / 2:.4f}, better" in scaled
    assert "91.2 %" in sets
    assert "1.25 classes" in sets
    assert "3.10 %" in refusals
    assert "0 % answered" in refusals


def test_pictures_with_their_captions(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "bbb": {}})
    run = tmp_path / "runs" / "bbb-0"
    words = {"title": "<b>Signal</b>", "caption": "What to see.", "alt": "A histogram."}
    save_picture(run, "snr", Figure(figsize=(1, 1)), **words)
    (run / "pictures" / "trace.svg").write_text(RED)
    (run / "pictures" / "trace.json").write_text("{")
    (run / "pictures" / "notes.txt").write_text("not a picture")
    (run / "traces.png").write_bytes((run / "pictures" / "snr.png").read_bytes())
    page = page_of(tmp_path)
    section = page.id("inside")
    assert section is not None
    fixed, first, second = section.all("figure")
    assert fixed.text.startswith("Traces of the chains · bbb")
    assert first.all("img")[0].attributes["alt"] == "A histogram."
    assert first.text.startswith("<b>Signal</b> · bbb")
    assert "What to see." in first.text
    assert second.text.startswith("trace · bbb")
    # In an img element a picture's script is never run.
    assert second.all("img")[0].attributes["src"].startswith("data:image/svg+xml;base64,")
    assert len(page.all("script")) == 1


@pytest.mark.parametrize("name", ["draws", "corruptions", "calibration", "diagnosis"])
@pytest.mark.parametrize("content", ["{", "3", "null", '{"kinds": 3, "temperature": []}'])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    write_folder(tmp_path, {"map": {}}, extras=True)
    (tmp_path / "runs" / "map-0" / f"{name}.json").write_text(content)
    problems = load_results(tmp_path).problems
    assert [f"{name}.json" in problem for problem in problems] in ([True], [])
    if content == "{":
        assert len(problems) == 1
    page_of(tmp_path)


def test_chains_that_do_not_agree(tmp_path: Path) -> None:
    write_folder(tmp_path, {"sgld": {}, "sghmc": {}})
    for name, rhat in {"sgld": [1.01, 1.3], "sghmc": [1.02, 1.05]}.items():
        table = {
            "predictions": {"rhat_median": rhat[0], "rhat_worst": rhat[1], "ess_least": 900.0},
            "log_posterior": {"rhat_worst": None},
        }
        (tmp_path / "runs" / f"{name}-0" / "diagnosis.json").write_text(json.dumps(table))
    (notice,) = notices.not_converged(load_results(tmp_path))
    assert notice.serious
    assert notice.text.striptags().startswith("sgld (R-hat 1.30): not converged.")


def test_a_prior_that_does_not_count(tmp_path: Path) -> None:
    write_folder(tmp_path, {"bbb": {}, "hwa": {}, "map": {}})
    for name, kl in {"bbb": 0.001, "hwa": 0.5}.items():
        row = {"epoch": 1, "nll": 0.999, "kl": kl}
        (tmp_path / "runs" / f"{name}-0" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (notice,) = notices.prior_ignored(load_results(tmp_path))
    said = notice.text.striptags().replace("\u202f", " ")
    assert said.startswith("bbb (KL is 0.1 % of the loss): in effect a point estimate.")


def test_a_run_that_names_no_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}}, extras=True)
    table = json.loads((tmp_path / "results.json").read_text())
    del table["methods"]["map"]["runs"][0]["folder"]
    (tmp_path / "results.json").write_text(json.dumps(table))
    (tmp_path / "draws.json").write_text("not this one")
    run = load_results(tmp_path).methods[0].runs[0]
    assert run.history == ()
    assert run.extras.draws == ()
