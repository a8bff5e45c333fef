"""Every method at its defaults on small tasks of many kinds, beside one network and an ensemble.

Each of `fit`'s methods trains with no option given on every task of quality_tasks.py, for several seeds, and
is scored on test data: NLL per example (per pixel for segmentation; targets of regressions are standardised),
accuracy or RMSE, and ECE or the coverage of 90 % intervals.

Cost: every method gets the task's epochs, as `map` does. `ensemble` is five networks of that many epochs, as
`fit` means it, for five times the cost. `ensemble/5` is five networks of a fifth of the epochs: the cost of
`map`.

Rows go to results/quality.jsonl as they are measured, under a key of the task, its budget, the method, the
seed and a digest of the method's code, so that a stopped run continues and a changed method is measured
again. docs/quality.md and docs/images/quality.png are made from the newest row of each task, method and seed.

Run: python benchmarks/quality.py [--tasks boston,digits] [--methods vogn,ivon] [--seeds 3] [--quick] [--page]
     (`make quality`: about an hour on two cores; Fashion-MNIST and CIFAR-10 are read from $TORCHBAYES_DATA,
     the UCI tables from $TORCHBAYES_UCI or else from there; a task whose data are missing is left out)
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from quality_tasks import TASKS, Problem, Task

import torchbayes as tb
from torchbayes.train.progress import NoProgress
from torchbayes.train.registry import METHODS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "results" / "quality.jsonl"
QUICK = 0.2  # of the epochs
EQUAL_COST = "ensemble/5"
SAMPLES = 32


def digest(method: str) -> str:
    """A digest of the code that a method is made of: what its defaults depend on."""
    cls = METHODS[method.partition("/")[0]]
    classes = [
        *cls.__mro__,
        *cls.algorithm.__mro__,
        *(b for used in cls.uses for b in used.__mro__),
    ]
    files = {inspect.getsourcefile(c) for c in classes if c.__module__.startswith("torchbayes.")}
    text = b"".join(Path(file).read_bytes() for file in sorted(f for f in files if f))
    return hashlib.sha256(text).hexdigest()[:12]


def epochs_of(task: Task, method: str, quick: bool) -> int | None:
    """The epochs that a method gets."""
    if task.epochs is None:
        return None
    epochs = max(1, round(task.epochs * (QUICK if quick else 1.0)))
    return max(1, epochs // 5) if method == EQUAL_COST else epochs


def key_of(task: Task, method: str, seed: int, quick: bool) -> str:
    """What a row is of; the same key need not be measured again."""
    budget = f"{epochs_of(task, method, quick)}x{task.batch}"
    return f"{task.name}/{budget}/{method}/{seed}/{digest(method)}"


def scores(problem: Problem, predictive: Any) -> dict[str, float]:
    """NLL and what users read beside it."""
    targets = problem.test[1]
    nll = -float(predictive.log_prob(targets).double().mean())
    if isinstance(predictive, tb.RegressionPredictive):
        low, high = predictive.quantile(0.05), predictive.quantile(0.95)
        inside = ((targets >= low) & (targets <= high)).double().mean()
        rmse = (predictive.mean - targets).square().mean().sqrt()
        return {"nll": nll, "rmse": float(rmse), "coverage": float(inside)}
    rows = tb.metrics.rows(predictive.probs, targets)
    return {"nll": nll, "accuracy": tb.metrics.accuracy(*rows), "ece": tb.metrics.ece(*rows)}


class _Updates(NoProgress):
    """Counts the updates, to tell what a method refuses from what breaks down."""

    count = 0

    def advance(self, loss: float) -> None:
        """Count one."""
        self.count += 1


def measure(name: str, method: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train and score one method on one task."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = TASKS[name]
    row: dict[str, Any] = {
        "key": key_of(task, method, seed, quick), "task": name, "method": method, "seed": seed,
        "quick": quick,
    }  # fmt: skip
    began, updates = time.process_time(), _Updates()
    try:
        problem = task.make(seed)
        epochs = epochs_of(task, method, quick)
        given = {} if epochs is None else {"epochs": epochs, "batch_size": task.batch}
        if method == EQUAL_COST and epochs is None:  # a fifth of what fit gives to one network
            given = {"members": 5}
        run = tb.fit(
            problem.network, problem.train, method.partition("/")[0], seed=seed, progress=updates,
            likelihood=problem.likelihood, **given,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        predictive = run.predict(problem.test[0], SAMPLES, generator=generator)
        found = scores(problem, predictive)
        row |= {k: (v if math.isfinite(v) else None) for k, v in found.items()}
        if not math.isfinite(found["nll"]):
            row["error"] = "the NLL is not finite"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        row["refused"] = updates.count == 0 and isinstance(error, (TypeError, ValueError))
    row["seconds"] = round(time.process_time() - began, 2)
    return row


def read_rows(file: Path = ROWS) -> list[dict[str, Any]]:
    """All rows that are whole, oldest first."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a kill in the middle of a line
    return rows


def append(row: dict[str, Any], file: Path = ROWS) -> None:
    """Add a row in one write, which other processes' rows cannot cut in two."""
    file.parent.mkdir(exist_ok=True)
    place = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(place, (json.dumps(row) + "\n").encode())
    finally:
        os.close(place)


def available(names: Iterable[str]) -> list[str]:
    """The tasks whose data are on this machine."""
    found = []
    for name in names:
        try:
            TASKS[name].make(0)
            found.append(name)
        except (tb.data.DataError, OSError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def main() -> None:
    """Measure what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", help="names, separated by commas")
    parser.add_argument("--methods", help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=Path, default=ROWS, help="where rows are kept")
    parser.add_argument("--quick", action="store_true", help="a fifth of the epochs, no page")
    parser.add_argument("--page", action="store_true", help="only write the page from the rows")
    args = parser.parse_args()
    for name, known in (("tasks", TASKS), ("methods", {**METHODS, EQUAL_COST: None})):
        wrong = [n for n in (getattr(args, name) or "").split(",") if n and n not in known]
        if wrong:
            parser.error(f"there is no {name[:-1]} {wrong[0]!r}: the names are {', '.join(known)}")
    if not args.page:
        tasks = available(args.tasks.split(",") if args.tasks else TASKS)
        methods = args.methods.split(",") if args.methods else [*METHODS, EQUAL_COST]
        known = {row["key"] for row in read_rows(args.rows)}
        jobs = [
            (task, method, seed, args.quick)
            for seed in range(1, 1 + args.seeds) for task in tasks for method in methods
            if key_of(TASKS[task], method, seed, args.quick) not in known
        ]  # fmt: skip
        print(f"{len(jobs)} runs to do", flush=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            for number, done in enumerate(
                as_completed([pool.submit(measure, *j) for j in jobs]), 1
            ):
                row = done.result()
                append(row, args.rows)
                said = " ".join(
                    f"{k} {row[k]:.3f}" for k in ("nll", "accuracy", "rmse", "ece", "coverage")
                    if row.get(k) is not None
                )  # fmt: skip
                print(
                    f"[{number}/{len(jobs)}] {row['task']} {row['method']} {row['seed']}: {said} "
                    f"{row.get('error', '')} ({row['seconds']} s)", flush=True,
                )  # fmt: skip
    if args.page or (not args.quick and args.rows == ROWS):
        from quality_page import write_page

        write_page(read_rows(args.rows))


if __name__ == "__main__":
    main()
