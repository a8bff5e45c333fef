"""What a run costs: the memory that training takes at its peak, and the numbers that a posterior stores."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from torchbayes.core.storage import read_tensors

__all__ = ["PeakMemory", "peak_memory", "stored_numbers"]


class PeakMemory:
    """The bytes that the work inside `peak_memory` took at most; None where that is not known."""

    bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure how much memory the work inside takes on top of what was in use before.

    On a GPU, what torch allocated there. On Linux, how far the process's resident memory rose, after
    memory that earlier work had freed was given back; small networks disappear in its noise of about a
    megabyte. Elsewhere nothing is known.

    Example:
        >>> with peak_memory() as peak:
        ...     _ = torch.ones(25_000_000)
        >>> peak.bytes is None or peak.bytes > 90_000_000
        True
    """
    peak = PeakMemory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    start = _start()
    yield peak
    end = _resident("VmHWM") if start is not None else None
    if start is not None and end is not None:
        peak.bytes = max(0, end - start)


def _start() -> int | None:
    """Give back what is free, reset the high-water mark, and read the memory in use."""
    if not sys.platform.startswith("linux"):
        return None
    gc.collect()
    # Another C library may hold back freed memory: that makes the figure a little smaller.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak, see proc(5)
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def stored_numbers(posterior: Path) -> int:
    """How many numbers a posterior's file, or folder of draws, holds.

    Args:
        posterior: What `Posterior.save` wrote.
    """
    files = sorted(posterior.glob("draw-*.safetensors")) if posterior.is_dir() else [posterior]
    return sum(t.numel() for file in files for t in read_tensors(file)[1].values())
