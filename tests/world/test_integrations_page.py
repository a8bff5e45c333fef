"""The blocks of docs/integrations.md run, section by section, where the section's package is installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
PREAMBLE, *SECTIONS = PAGE.read_text(encoding="utf-8").split("\n## ")
PACKAGES = {
    "Lightning": "lightning", "Hugging Face": "transformers", "accelerate": "accelerate",
    "skorch": "skorch", "Weights & Biases": "wandb", "MLflow": "mlflow",
    "The Hub": "torchbayes",
}  # fmt: skip


def blocks(text: str) -> list[str]:
    return re.findall(r"```py\n(.*?)```", text, re.DOTALL)


def test_every_section_names_its_package() -> None:
    assert {section.partition("\n")[0] for section in SECTIONS} == set(PACKAGES)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("title", PACKAGES)
def test_a_section_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(PACKAGES[title]) is None:
        pytest.skip(f"{PACKAGES[title]} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    (section,) = [s for s in SECTIONS if s.startswith(f"{title}\n")]
    names: dict[str, Any] = {}
    code = [*blocks(PREAMBLE), *blocks(section)]
    assert len(code) > 1
    for number, block in enumerate(code):
        exec(compile(block, f"{title} block {number}", "exec"), names)
    wanted = names["labels"] if title == "Hugging Face" else names["data"].test.targets
    assert (names["p"].prediction == wanted).float().mean() > 0.8
