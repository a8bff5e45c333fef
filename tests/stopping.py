"""A run that ends in the middle, as a kill would end it."""

from __future__ import annotations

from torchbayes.train.progress import Progress

__all__ = ["StopAfter", "Stopped"]


class Stopped(Exception):
    """Stands for a kill: the process gets no chance to tidy up."""


class StopAfter(Progress):
    """Ends the run after some steps, between the step and the next checkpoint."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def start(self, name: str, total: int, done: int) -> None:
        pass

    def advance(self, loss: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stopped
