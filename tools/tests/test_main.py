"""`python -m tools.records`: the files follow from the records, and --check notices any that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.records.__main__ import main, outdated, write
from torchbayes.experiments.record import record_of

CLAIMS = """
[[claim]]
paper = "Nobody"
where = "nowhere"
text = "it averages well"
reported = "everything"
figures = { error = "hwa/mnist-lenet5#hwa/error" }
shown = "{error:.3f}"
reproduced = "error <= 0.5"
"""
README = "# Mine\n\n<!-- claims -->\n<!-- /claims -->\n\n<!-- speed -->\nOLD\n<!-- /speed -->\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one claim and one record, of a recipe that has a picture."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "claims.toml").write_text(CLAIMS)
    (tmp_path / "README.md").write_text(README)
    run = tmp_path / "runs" / "hwa-0"
    run.mkdir(parents=True)
    line = '{"epoch": %d, "validation_nll": 0.5, "validation_accuracy": 0.75}\n'
    (run / "metrics.jsonl").write_text("".join(line % epoch for epoch in (1, 2)))
    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {"epochs": 2, "seeds": [0]},
        "methods": {"hwa": {"runs": [{"seed": 0, "accuracy": 0.75, "folder": "runs/hwa-0"}]}},
    }
    record_of("hwa/mnist-lenet5", "T", "cpu", "c", results, tmp_path).save(tmp_path / "results")
    return tmp_path


def test_what_is_written_is_up_to_date(root: Path) -> None:
    assert outdated(root)
    write(root)
    assert outdated(root) == []
    page = (root / "docs" / "results" / "nobody.md").read_text(encoding="utf-8")
    assert "| 0.250<br>*2 epochs, 1 seed, 0 min* |" in page
    first = (root / "docs" / "results.md").read_text(encoding="utf-8")
    assert "| [Nobody](results/nobody.md) | 1 | 0 | 0 | 0 |" in first
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert "| Nobody | 1 | 0 | 0 | 0 |" in readme
    assert "OLD" in readme  # no benchmark was measured


@pytest.mark.parametrize("file", ["docs/results.md", "docs/results/hwa.md", "README.md"])
def test_a_changed_text_is_noticed(root: Path, file: str) -> None:
    write(root)
    text = (root / file).read_text(encoding="utf-8")
    (root / file).write_text(text.replace("1", "2"), encoding="utf-8")
    assert outdated(root) == [root / file]


def test_a_missing_picture_is_noticed(root: Path) -> None:
    write(root)
    picture = root / "docs" / "images" / "results" / "hwa-mnist-lenet5-curves.png"
    picture.unlink()
    assert outdated(root) == [picture]


def test_check_fails_with_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tools.records", "--check"])
    with pytest.raises(SystemExit, match=r"docs/results\.md.*run `make records`"):
        main(root)
    assert not (root / "docs").exists()
    monkeypatch.setattr("sys.argv", ["tools.records"])
    main(root)
    monkeypatch.setattr("sys.argv", ["tools.records", "--check"])
    main(root)
