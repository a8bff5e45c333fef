"""Progress displays: a bar with the time left, or nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

__all__ = ["NoProgress", "Progress", "RichProgress"]


class Progress(ABC):
    """Receives the progress of a run from `fit`."""

    @abstractmethod
    def start(self, name: str, total: int, done: int) -> None:
        """Begin a run of `total` steps, `done` of which were taken in an earlier session."""

    @abstractmethod
    def advance(self, loss: float) -> None:
        """Count one more step; `loss` is the epoch's mean so far."""

    def note(self, line: str) -> None:  # noqa: B027
        """Show a line before the run begins."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(  # noqa: B027
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run, whether it succeeded or not."""


class NoProgress(Progress):
    """No display."""

    def start(self, name: str, total: int, done: int) -> None:
        """Nothing."""

    def advance(self, loss: float) -> None:
        """Nothing."""


class RichProgress(Progress):
    """One bar with the loss, the time taken and the time left."""

    def note(self, line: str) -> None:
        """Print the line above the bar."""
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self, name: str, total: int, done: int) -> None:
        """Draw the bar."""
        self._bar = bars.Progress(
            bars.TextColumn("[bold]{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.TaskProgressColumn(),
            bars.TextColumn("loss {task.fields[loss]:.4f}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=5,
        )
        self._task = self._bar.add_task(
            escape(name), total=total, completed=done, loss=float("nan")
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def advance(self, loss: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=1, loss=loss)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the finished bar on the screen."""
        self._bar.stop()
