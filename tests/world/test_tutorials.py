"""The tutorials that need other people's packages, which warn of things that are theirs to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import ROOT, run_blocks


@pytest.mark.filterwarnings("default")
def test_hugging_face_and_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / "docs" / "tutorials" / "hugging-face.md")
    right = names["p"].prediction == names["test"]["labels"]
    assert right.float().mean() > 0.9
    assert all("lora" in name or "classifier" in name for name in names["posterior"].mean())
