"""How a comparison shows where it is: what runs, what is left, how long that will take, what came out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from torchbayes.experiments.compare import Job
from torchbayes.train.progress import Progress

__all__ = ["PlanDisplay", "clock", "seconds_left"]

_NAMED = 4


def seconds_left(
    waiting: Sequence[str],
    taken: dict[str, list[float]],
    running: tuple[str, float, float] | None = None,
) -> float | None:
    """Guess how long the rest of a plan takes, or None as long as nothing is known.

    A row takes as long as its runs with other seeds did, a row that has not run yet as long as the
    others on average.

    Args:
        waiting: The row of every run that has not begun.
        taken: The seconds of finished runs, by row.
        running: The row of the run in hand, its seconds so far, and the share of it that is done.

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
    """A time left as hours, minutes and seconds.

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
    """One bar for the whole plan and one for the run in hand; every result as it comes.

    Args:
        jobs: The runs of the plan.
        console: Where to draw.
    """

    def __init__(self, jobs: Sequence[Job], console: Console | None = None) -> None:
        self.jobs = jobs
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
        self._begun: float | None = None
        self._plan = self.bars.add_task("all", total=len(jobs), note="", left="–")
        self._run = self.bars.add_task("", total=1, note="", left="–", visible=False)
        self.show(0, 0.0)

    def of(self, number: int, job: Job) -> Progress:
        """The display of the run with that number."""
        self._begun = time.monotonic()
        return _RunProgress(self, number)

    def finished(self, job: Job, scores: dict[str, Any]) -> None:
        """Note a run's scores; one that an earlier session finished goes by in silence."""
        number = self.jobs.index(job)
        if self._begun is not None:
            seconds = time.monotonic() - self._begun
            self._taken.setdefault(job.row.name, []).append(seconds)
            self._begun = None
            self.bars.console.print(f"[green]done[/] {_said(job, scores)}", highlight=False)
        self.show(number + 1, 0.0)

    def failed(self, number: int, error: BaseException) -> None:
        """Note that a run broke down."""
        self._begun = None
        name = escape(self.jobs[number].row.name)
        self.bars.console.print(f"[red]failed[/] {name}: {escape(str(error))}", highlight=False)
        self.show(number + 1, 0.0)

    def show(self, number: int, share: float) -> None:
        """Redraw the plan's bar: `number` runs are over, and of the next one this share."""
        running = None
        if self._begun is not None and number < len(self.jobs):
            running = (self.jobs[number].row.name, time.monotonic() - self._begun, share)
        waiting = [job.row.name for job in self.jobs[number + (running is not None) :]]
        names = list(dict.fromkeys(waiting))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        rest = f", then {', '.join(names[:_NAMED])}{more}" if names else ""
        self.bars.update(
            self._plan,
            completed=number + share,
            note=escape(f"{number} of {len(self.jobs)} runs{rest}"),
            left=clock(seconds_left(waiting, self._taken, running)),
        )

    def show_run(self, name: str, total: int, done: int, note: str) -> None:
        """Redraw the bar of the run in hand."""
        left = None
        if self._begun is not None and done > 0:
            left = (time.monotonic() - self._begun) * (total - done) / done
        self.bars.update(
            self._run,
            description=escape(name), total=total, completed=done, note=note, left=clock(left),
            visible=True,
        )  # fmt: skip


def _said(job: Job, scores: dict[str, Any]) -> str:
    shown = {"accuracy": "accuracy {:.2%}", "rmse": "RMSE {:.3f}", "nll": "NLL {:.4f}"}
    parts = [text.format(scores[key]) for key, text in shown.items() if scores.get(key) is not None]
    return escape(f"{job.row.name} (seed {job.experiment.seed}): {', '.join(parts)}")


class _RunProgress(Progress):
    """Shows a run of the plan on the plan's two bars."""

    def __init__(self, display: PlanDisplay, number: int) -> None:
        self._display, self._number = display, number

    def start(self, name: str, total: int, done: int) -> None:
        """A run is about to begin."""
        self._name, self._total, self._done = name, max(1, total), done
        self._display.bars.reset(self._display._run)
        self._display.show_run(name, self._total, done, "")

    def advance(self, loss: float) -> None:
        """One more step is done."""
        self._done += 1
        self._display.show_run(self._name, self._total, self._done, f"loss {loss:.4f}")
        self._display.show(self._number, min(0.99, self._done / self._total))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The training is over; the scores follow, or an error is shown."""
        if error is not None and isinstance(error, Exception):
            self._display.failed(self._number, error)
