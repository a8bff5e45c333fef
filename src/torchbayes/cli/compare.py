"""`torchbayes compare` and `report`: compare several methods."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, cell, table, visible

if TYPE_CHECKING:
    from torchbayes.experiments.compare import Comparison, Job, Row

__all__ = ["compare", "report", "run_plan", "show_results"]

_TABLES = ("table:", "uci:")
_COLUMNS = {
    # key: (title, whether more is better, digits)
    "accuracy": ("acc. ↑", True, 4),
    "rmse": ("RMSE ↓", False, 4),
    "crps": ("CRPS ↓", False, 4),
    "nll": ("NLL ↓", False, 4),
    "ece": ("ECE ↓", False, 4),
    "auroc_misclassification": ("AUROC err ↑", True, 3),
    "auroc_ood": ("AUROC OOD ↑", True, 3),
    "auroc_noise": ("AUROC noise ↑", True, 3),
    "seconds": ("time s", None, 1),
}


def compare(
    recipe: opt.Recipe = None,
    cpu: opt.Cpu = False,
    data: opt.Data = None,
    target: opt.Target = None,
    task: opt.Task = None,
    drop: opt.Drop = None,
    split: opt.TableSplit = None,
    test_share: opt.TestShare = None,
    model: opt.Model = None,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated names.", show_default="all")
    ] = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    samples: opt.Samples = None,
    seeds: Annotated[int, typer.Option(help="Runs of every method, with different seeds.")] = 1,
    augment: opt.Augment = None,
    init: opt.Init = None,
    schedule: opt.ScheduleName = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="An option: lr=0.01 for every method that has it, ensemble.members=3 for one; repeatable.",
        ),
    ] = None,
    model_set: opt.ModelSet = None,
    setting: opt.Settings = None,
    corruptions: Annotated[
        bool | None,
        typer.Option(
            "--corruptions/--no-corruptions",
            help="Also score noisy, blurred and otherwise corrupted test images.",
            show_default="in the demo only",
        ),
    ] = None,
    tune: Annotated[
        int,
        typer.Option(
            help="Trials to choose every method's lr and prior with, on a fifth of the training set.",
            show_default="none",
        ),
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("comparison"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --out already has.")] = False,
    device: opt.Device = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Train several methods at the same budget, score them and write an HTML report.

    Without --data, --model and --recipe this is the demo: the embedded digits with the settings of
    recipe demo/digits (40 passes in all for every method, corrupted images too), in a few minutes. Else the
    defaults below apply.

    Writes results.json, report.html, table.md and table.tex to --out.
    Stop with Ctrl-C and continue with `--resume`.
    """
    from torchbayes.experiments.compare import Comparison, rows_from
    from torchbayes.experiments.recipes import find_recipe
    from torchbayes.experiments.settings import Experiment
    from torchbayes.train.registry import METHODS

    demo = recipe is None and data is None and model is None
    # A recipe compares the methods that it names; the demo and a comparison without a recipe, all methods.
    every = recipe is None
    recipe = find_recipe("demo/digits") if demo else recipe
    flags = {
        "data": data, "model": model, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "augment": augment, "init": init, "schedule": schedule,
    }  # fmt: skip
    columns = {
        "target": target, "task": task, "drop": drop, "split": split, "test_share": test_share,
    }  # fmt: skip
    settings = opt.settings_from(recipe, cpu, model_set, setting, flags, columns)
    tables: dict[str, dict[str, Any]] = settings.pop("methods", {})
    lines: dict[str, dict[str, Any]] = settings.pop("rows", {})
    usual = settings.get("method", Experiment.method)
    if tables:
        kept = [m for m in tables if m in METHODS] if every else list(tables)
        lines = {name: {"method": name, "options": tables[name]} for name in kept}
    named, free = list(lines), every or bool(tables) or not lines
    if free:  # any method may be asked for
        there = {line.get("method", usual) for line in lines.values() if "last_of" not in line}
        rest = {m: {"method": m, "options": {}} for m in METHODS if m not in there}
        lines = {**lines, **rest}
    names = list(lines) if every or not named else named
    if methods is not None:
        asked_for = _names(methods, {} if free else lines)
        # A row may start from one above it, so a recipe's rows keep their order.
        names = asked_for if free else [name for name in lines if name in asked_for]
    lines = {name: lines[name] for name in names}
    trained = {n: t.get("method", usual) for n, t in lines.items() if "last_of" not in t}
    given = opt.method_pairs(set_ or [], trained)
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: expected at least 1")
    if (out / "results.json").exists() and not resume:
        raise ValueError(f"{out} already holds a comparison: add --resume or choose another folder")
    asked = {key: value for key, value in flags.items() if value is not None and value != []}
    rows = rows_from(lines, settings, asked, given)
    if tune:
        rows = _tuned(rows, tune, out, data_dir)
    base = Experiment.from_settings(
        {**settings, "method": rows[0].experiment.method, "options": {}}, "the settings"
    )
    command = shlex.join(["torchbayes", *sys.argv[1:]])
    runs = range(base.seed, base.seed + seeds)
    damaged = demo if corruptions is None else corruptions
    plan = Comparison(base, rows, runs, out, data_dir, command, damaged, device)
    show_results(out, run_plan(plan), as_json)


def _tuned(rows: list[Row], trials: int, out: Path, data_dir: Path | None) -> list[Row]:
    """Give every method the same number of trials, and return the rows with what they found."""
    from torchbayes.cli.tune import held_out, search
    from torchbayes.experiments.compare import Row, check_name
    from torchbayes.experiments.tune_run import tuned

    for row in rows:
        if str(row.experiment.init).startswith("row:"):
            raise ValueError(
                f"row {row.name!r} starts from another row's run, which a search does not have: "
                "leave out --tune"
            )
    found: dict[str, Row] = {}
    for row in rows:
        if row.last_of is not None:
            found[row.name] = Row(row.name, found[row.last_of].experiment, row.last_of)
            continue
        check_name(row.name)
        folder = out / "tuning" / row.name
        result = search(held_out(row.experiment), folder, trials, resume=True, data_dir=data_dir)
        found[row.name] = Row(row.name, tuned(row.experiment, result))
    return list(found.values())


def run_plan(plan: Comparison) -> Path:
    """Complete a plan under one progress display, and write the report."""
    from torchbayes.cli.plan import PlanDisplay
    from torchbayes.report import write_report

    display = PlanDisplay([job.row.name for job in plan.jobs])
    try:
        with display.bars:
            plan.run(
                display.of, lambda n, scores: display.finished(n, _result(plan.jobs[n], scores))
            )
    except KeyboardInterrupt:
        if any(job.scores for job in plan.jobs):
            write_report(plan.out)  # of the results so far
        raise
    if plan.failed and not any(job.scores for job in plan.jobs):
        raise ValueError(f"no method could be trained: {next(iter(plan.failed.values()))}")
    return write_report(plan.out)


def _result(job: Job, scores: dict[str, Any]) -> str:
    shown = {"accuracy": "accuracy {:.2%}", "rmse": "RMSE {:.3f}", "nll": "NLL {:.4f}"}
    parts = [text.format(scores[key]) for key, text in shown.items() if scores.get(key) is not None]
    return f"(seed {job.experiment.seed}): {', '.join(parts)}"


def _names(text: str, rows: Mapping[str, Any]) -> list[str]:
    from torchbayes.train.registry import find_method

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("methods is empty: give names such as map,ensemble")
    for name in names:
        if not rows:
            find_method(name)
        elif name not in rows:
            raise ValueError(f"the recipe has no row {name!r}: choose from {', '.join(rows)}")
    return list(dict.fromkeys(names))


def report(
    out: Annotated[Path, typer.Argument(help="Folder of a comparison or of one finished run.")],
    as_json: opt.Json = False,
) -> None:
    """Rewrite report.html, table.md and table.tex from the results of a comparison or of one run."""
    from torchbayes.report import write_report

    page = write_report(out)
    if (out / "results.json").exists():
        show_results(out, page, as_json)
    else:
        answer({"page": str(page)}, as_json, f"page: {page}")


def show_results(out: Path, page: Path, as_json: bool) -> None:
    """Print a comparison's table, or its results.json."""
    from torchbayes.core.reading import read_json

    # The page has been written from it, so it has methods; all else may be missing.
    results = read_json(out / "results.json", "run `torchbayes compare` again")
    rows = {name: _numbers(row) for name, row in sorted(results["methods"].items(), key=_by_nll)}
    shown = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows.values())]
    failed, notes = results.get("failed"), results.get("notes")
    model, ood = (str(results.get(key) or "–") for key in ("model", "ood"))
    compared = table(
        f"{model} on {results.get('data') or '–'}",
        ["method", *(_COLUMNS[key][0] for key in shown)],
        ([name, *(_cell(key, row, rows) for key in shown)] for name, row in rows.items()),
    )
    compared.columns[0].style, compared.columns[0].no_wrap = "bold", True
    answer(
        results,
        as_json,
        compared,
        *(
            Text.assemble((visible(name), "bold"), visible(f" failed: {why}"))
            for name, why in (failed.items() if isinstance(failed, dict) else ())
        ),
        *(
            str(note)
            for note in (notes if isinstance(notes, list) else [])[:1]
            if _is_table(results)
        ),
        f"out of distribution: {ood}   results: {out / 'results.json'}   page: {page}",
    )


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a row of results.json that are numbers, and their spread."""
    from torchbayes.report.extras import finite_numbers

    spread = row.get("spread")
    return {
        **finite_numbers(row),
        "spread": finite_numbers(spread if isinstance(spread, dict) else {}),
    }


def _by_nll(row: tuple[str, dict[str, Any]]) -> float:
    return float(_numbers(row[1]).get("nll", math.inf))


def _is_table(results: dict[str, Any]) -> bool:
    settings = results.get("settings")
    return isinstance(settings, dict) and str(settings.get("data")).startswith(_TABLES)


def _cell(key: str, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str | Text:
    value, (_, more, digits) = row.get(key), _COLUMNS[key]
    if value is None:
        return "–"
    spread = row["spread"].get(key)
    style = f".{digits}f"
    text = cell(value, style) + ("" if spread is None else f"\n±{cell(spread, style)}")
    if more is None:
        return text
    values = [r[key] for r in rows.values() if r.get(key) is not None]
    best = max(values) if more else min(values)
    return Text(text, style="bold green") if value == best and len(values) > 1 else text
