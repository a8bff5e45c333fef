"""Progress display for a sequence of runs: what is running, what is left, the time left, the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from torchbayes.cli.output import visible
from torchbayes.train.progress import Progress

__all__ = ["PlanDisplay", "clock", "seconds_left"]

_NAMED = 4


def seconds_left(
    waiting: Sequence[str],
    taken: dict[str, list[float]],
    running: tuple[str, float, float] | None = None,
) -> float | None:
    """Estimate how long the rest of a plan takes, or None as long as nothing is known.

    A row takes as long as its runs with other seeds did, a row that has not run yet as long as the
    others on average.

    Args:
        waiting: Row of each run that has not started.
        taken: Seconds of finished runs, by row.
        running: Row of the current run, its seconds so far, and the share of it that is done.

    Example:
        >>> seconds_left(["map", "bbb"], {"map": [2.0, 4.0]}, ("map", 1.0, 0.25))
        9.0
    """
    known = {row: statistics.fmean(times) for row, times in taken.items() if times}
    now = 0.0
    if running is not None:
        row, seconds, share = running
        if share > 0.02:
            known.setdefault(row, seconds / share)
            now = seconds * (1 - share) / share
        elif row in known:
            now = max(0.0, known[row] - seconds)
    if not known:
        return None
    usual = statistics.fmean(known.values())
    return now + sum(known.get(row, usual) for row in waiting)


def clock(seconds: float | None) -> str:
    """Format a duration as hours, minutes and seconds.

    Example:
        >>> clock(None), clock(75.4), clock(3700)
        ('–', '1:15', '1:01:40')
    """
    if seconds is None:
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class PlanDisplay:
    """One bar for the whole plan and one for the current run; results are printed as they arrive.

    Args:
        rows: Row of each run, in order; runs of the same row take about the same time.
        console: Console to draw on.
    """

    def __init__(self, rows: Sequence[str], console: Console | None = None) -> None:
        self.rows = rows
        self.bars = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left {task.fields[left]}"),
            console=Console(stderr=True) if console is None else console,
            refresh_per_second=5,
        )
        self._taken: dict[str, list[float]] = {}
        self._started: float | None = None
        self._plan = self.bars.add_task("all", total=len(rows), note="", left="–")
        self._run = self.bars.add_task("", total=1, note="", left="–", visible=False)
        self.show(0, 0.0)

    def of(self, number: int) -> Progress:
        """Return the display of the run with that number."""
        self._started = time.monotonic()
        return _RunProgress(self, number)

    def finished(self, number: int, result: str) -> None:
        """Print a run's result, unless an earlier session finished the run."""
        if self._started is not None:
            self._taken.setdefault(self.rows[number], []).append(time.monotonic() - self._started)
            self._report("[green]done[/]", f"{self.rows[number]} {result}")
        self.show(number + 1, 0.0)

    def failed(self, number: int, error: BaseException) -> None:
        """Print that a run failed."""
        self._report("[red]failed[/]", f"{self.rows[number]}: {error}")
        self.show(number + 1, 0.0)

    def _report(self, outcome: str, text: str) -> None:
        self._started = None
        self.bars.console.print(f"{outcome} {escape(visible(text))}", highlight=False)

    def show(self, number: int, share: float) -> None:
        """Redraw the plan's bar: `number` runs are finished, and this share of the next one."""
        running = None
        if self._started is not None and number < len(self.rows):
            running = (self.rows[number], time.monotonic() - self._started, share)
        waiting = self.rows[number + (running is not None) :]
        names = list(dict.fromkeys(waiting))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        rest = f", then {', '.join(names[:_NAMED])}{more}" if names else ""
        self.bars.update(
            self._plan,
            completed=number + share,
            note=escape(visible(f"{number} of {len(self.rows)} runs{rest}")),
            left=clock(seconds_left(waiting, self._taken, running)),
        )

    def show_run(self, name: str, total: int, done: int, note: str) -> None:
        """Redraw the bar of the current run."""
        left = None
        if self._started is not None and done > 0:
            left = (time.monotonic() - self._started) * (total - done) / done
        self.bars.update(
            self._run,
            description=escape(visible(name)), total=total, completed=done, note=note, left=clock(left),
            visible=True,
        )  # fmt: skip


class _RunProgress(Progress):
    """Progress of one run of the plan, shown on the plan's two bars."""

    def __init__(self, display: PlanDisplay, number: int) -> None:
        self._display, self._number = display, number

    def start(self, name: str, total: int, done: int) -> None:
        self._name, self._total, self._done = name, max(1, total), done
        self._display.bars.reset(self._display._run)
        self._display.show_run(name, self._total, done, "")

    def advance(self, loss: float) -> None:
        self._done += 1
        self._display.show_run(self._name, self._total, self._done, f"loss {loss:.4f}")
        self._display.show(self._number, min(0.99, self._done / self._total))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An interrupt is not a failure: the run can be resumed.
        if isinstance(error, Exception):
            self._display.failed(self._number, error)
