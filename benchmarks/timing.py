"""Ratios, not seconds: two or more jobs run in turns (A, B, A, B, …) and their medians compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

START = time.perf_counter()


def budgeted(
    jobs: dict[str, Callable[[], object]],
    seconds: float,
    *,
    least: int = 8,
    most: int = 40,
    cycle: int = 1,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """As `interleaved`, with as many rounds as fit into `seconds`.

    Args:
        jobs: What to time.
        seconds: For all rounds together.
        least: The rounds that there are at least.
        most: And at most.
        cycle: The rounds are a multiple of it: of a job that does something more every so often, all of
            its kinds of steps are then seen as often as they come.
        warmup: The rounds before those that count; the last of them tells how long one takes.
    """
    for _ in range(warmup):
        start = time.perf_counter()
        for job in jobs.values():
            job()
        once = time.perf_counter() - start
    rounds = min(max(int(seconds / once), least), most)
    return interleaved(jobs, rounds=-(-rounds // cycle) * cycle, warmup=0)


def progress(text: str) -> None:
    """Print a line with the minutes and seconds since the start."""
    minutes, seconds = divmod(int(time.perf_counter() - START), 60)
    print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)


def interleaved(
    jobs: dict[str, Callable[[], object]], *, rounds: int = 30, warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """The seconds of every job in every round, the jobs taking turns.

    With `clock=time.process_time` seconds are the processor's, on a machine with other work.
    """
    for _ in range(warmup):
        for job in jobs.values():
            job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = clock()
            job()
            seconds[name].append(clock() - start)
    return seconds


def ratios(
    seconds: dict[str, list[float]], to: str, *, mean: bool = False
) -> dict[str, dict[str, float]]:
    """Median (or mean) and quartiles of every job's time, relative to that of job `to`."""
    centre = statistics.mean if mean else statistics.median
    base = centre(seconds[to])
    result = {}
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        middle = centre(values)
        result[name] = {
            "ratio": round(middle / base, 3),
            "low": round(low / base, 3),
            "high": round(high / base, 3),
        }
    return result


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print a table of ratios."""
    print(title)
    for name, row in table.items():
        print(f"  {name:32s} {row['ratio']:6.3f}   quartiles {row['low']:.3f} to {row['high']:.3f}")
