"""A recipe that differs from what its record was measured with: the page says in what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.records.changes import changes_since
from tools.records.page import results_pages
from torchbayes.experiments.record import Record, record_of

RECIPE = """
title = "T"
data = "digits"
epochs = 4

[cpu]
epochs = 2

[rows.plain]
method = "map"

[rows.plain.options]
prior = 2.0

[rows.chain]
method = "sgld"
"""


def record(recipe: str, size: str = "full", **chain: Any) -> Record:
    shared = {"data": "digits", "epochs": 2 if size == "cpu" else 4, "options": {}, "seeds": [0]}
    plain = {"options": {"prior_precision": 2.0}}  # as the option was called once
    methods = {
        "plain": {"settings": plain, "runs": [{"seed": 0, "nll": 0.5}]},
        "chain": {"settings": {"method": "sgld", **chain}, "runs": [{"seed": 0, "nll": 0.5}]},
    }
    created = "2026-01-02T03:04:05+00:00"
    measured = {"created": created, "settings": shared, "methods": methods}
    return record_of(recipe, "T", size, "c", measured)


def changes(folder: Path, measured: Record, text: str) -> dict[str, str]:
    file = folder / f"{measured.recipe}.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return changes_since(folder, {measured.recipe: measured})


@pytest.mark.parametrize("size", ["full", "cpu"])
def test_the_same_settings_are_no_change(tmp_path: Path, size: str) -> None:
    assert changes(tmp_path, record("a/b", size), RECIPE) == {}


def test_a_changed_recipe_is_said_on_its_page(tmp_path: Path) -> None:
    text = RECIPE.replace("epochs = 4", "epochs = 5").replace("[rows.chain]", "[rows.new]")
    text += '\n[rows.chain]\nmethod = "sgld"\nclip_norm = 1.0\noptions = { chains = 2 }\n'
    measured = record("a/b", options={"lr": 0.5})
    found = changes(tmp_path, measured, text)
    assert found["a/b"] == (
        "The recipe has changed since: `plain`: `epochs` was 4, is 5; `chain`: `clip_norm` was 0.0, is 1.0, "
        "`epochs` was 4, is 5, `chains` was the default then, is 2, `lr` was 0.5, is the default; "
        "`new` added."
    )
    page = results_pages([], {"a/b": measured}, {}, found)["results/a.md"]
    assert f"`recipes/a/b.toml`\n\n{found['a/b']}\n" in page


def test_rows_and_recipes_that_are_gone(tmp_path: Path) -> None:
    text = RECIPE.replace('[rows.chain]\nmethod = "sgld"\n', "")
    assert changes(tmp_path, record("a/b"), text)["a/b"].endswith("since: `chain` removed.")
    measured = record("a/c")
    assert changes_since(tmp_path, {"a/c": measured}) == {"a/c": "The recipe is gone."}


def test_a_sequence_of_tasks(tmp_path: Path) -> None:
    text = 'title = "T"\ndata = "digits"\nmethod = "vogn"\n[continual]\ntasks = "permuted"\ncount = %d\n'
    shared = {"data": "digits", "method": "vogn", "tasks": "permuted", "count": 5, "seeds": [0]}
    rows = {name: {"runs": [{"seed": 0, "accuracy": 0.5}]} for name in ("vogn", "fine-tuning")}
    created = "2026-01-02T03:04:05+00:00"
    measured = record_of(
        "a/b", "T", "full", "c", {"created": created, "settings": shared, "methods": rows}
    )
    assert changes(tmp_path, measured, text % 5) == {}
    found = changes(tmp_path, measured, text % 10)
    assert found == {"a/b": "The recipe has changed since: `count` was 5, is 10."}
