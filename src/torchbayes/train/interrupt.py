"""Turn Ctrl-C, SIGTERM and SIGHUP into stop requests, so that a run can save itself first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_requests"]


@dataclass
class StopRequest:
    """Whether a stop was requested, and by which signal."""

    requested: bool = False
    signal: int = 0


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request to stop after the step; a second one stops at once.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {s: signal.getsignal(s) for s in known if signal.getsignal(s) != signal.SIG_IGN}

    def note(number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested, stop.signal = True, number

    try:
        for number in before:
            signal.signal(number, note)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
