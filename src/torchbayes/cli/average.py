"""`torchbayes average`: score averages of several draws of a run's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from torchbayes.cli.options import DataDir, Device, Json, Seed, numbers
from torchbayes.cli.output import answer, cell, table

__all__ = ["average"]


def average(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    how: Annotated[str, typer.Option(help="branching, parallelizing or widening.")] = "branching",
    times: Annotated[
        str, typer.Option(help="Comma-separated numbers of draws to average.")
    ] = "1,4,16",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results of all runs.")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Average draws of the weights and score them on the test set, batch norm re-estimated for each.

    *branching* averages the outputs of N networks, *parallelizing* those of N copies of every residual
    block; *widening* builds every block with N times the channels. A run with fewer members than asked for,
    such as an ensemble of four or a single network, is averaged as far as possible.

    Writes average-HOW.json to every run folder, with how often four networks are wrong together (quadruple
    faults) and how weights correlate within and between blocks, and weights.png if the posterior is random.

    Example: `torchbayes average comparison/runs/* --times 1,4,16 --out average.json`
    """
    counts = sorted(set(numbers(times, int, "times", "whole numbers such as 1,4,16")))
    if counts[0] < 1:
        raise ValueError(f"times is {times!r}: expected whole numbers such as 1,4,16")
    from torchbayes.core.device import process_device
    from torchbayes.core.storage import write_json
    from torchbayes.experiments.average_run import averaged

    place = process_device(device)
    results = [averaged(run, how, counts, seed, data_dir, place) for run in runs]
    if out is not None:
        write_json(out, results)
    answer(results, as_json, *_tables(results, how))


def _tables(results: list[dict[str, Any]], how: str) -> list[Table | str]:
    scores = table(
        f"{how}: medians over groups of draws",
        ("run", "×", "error", "NLL", "ECE", "error ¹", "NLL ¹", "ECE ¹"),
        (
            [result["run"], str(row["times"])]
            + [
                format(row[prefix + name], style)
                for prefix in ("", "probabilities_")
                for name, style in (("error", ".2%"), ("nll", ".4f"), ("ece", ".4f"))
            ]
            for result in results
            for row in result["rows"]
        ),
    )
    shapes = table(
        "misclassified by 0 … 4 of four networks; correlations of weights in and between blocks",
        ("run", "0", "1", "2", "3", "4", "|r| within", "between"),
        (
            [result["run"]]
            + [cell(count, ".0f") for count in result.get("quadruple_faults", [None] * 5)]
            + [cell(result.get("correlations", {}).get(n), ".3f") for n in ("within", "between")]
            for result in results
            if "quadruple_faults" in result or "correlations" in result
        ),
    )
    note = "¹ probabilities averaged instead of logits"
    return [scores, note, shapes] if shapes.row_count else [scores, note]
