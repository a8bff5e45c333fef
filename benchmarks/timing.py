"""Ratios, not seconds: two or more jobs run in turns (A, B, A, B, …) and their medians compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(
    jobs: dict[str, Callable[[], object]], *, rounds: int = 30, warmup: int = 3
) -> dict[str, list[float]]:
    """The seconds of every job in every round, the jobs taking turns."""
    for _ in range(warmup):
        for job in jobs.values():
            job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], to: str) -> dict[str, dict[str, float]]:
    """Median and quartiles of every job's time, relative to the median of job `to`."""
    base = statistics.median(seconds[to])
    result = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
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
