"""Experiment tracking: TensorBoard, or any tracker with two methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

__all__ = ["Logger", "TensorBoard"]


@runtime_checkable
class Logger(Protocol):
    """A tracker: anything with these two methods.

    Example:
        >>> class Printer:
        ...     def metrics(self, step, values):
        ...         print(step, sorted(values))
        ...     def artifact(self, path):
        ...         print(path.name)
        >>> isinstance(Printer(), Logger)
        True
    """

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of an epoch; `step` counts the updates so far."""

    def artifact(self, path: Path) -> None:
        """Record a file that the run has written: its posterior."""


class TensorBoard:
    """Writes event files that `tensorboard --logdir` shows (extra `tracking`).

    Args:
        folder: Folder for the event files.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'torchbayes[tracking]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        """Record the path as text: event files hold curves and pictures, not weights."""
        self._writer.add_text("artifact", str(path))
        self._writer.flush()
