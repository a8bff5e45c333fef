"""Cost of a run: peak memory of training, and how many numbers the posterior stores."""

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
    """Peak memory in bytes of the code inside `peak_memory`; None where it cannot be measured."""

    bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure how much memory the code inside takes on top of what was in use before.

    On a GPU, what torch allocated there. On Linux, the rise of the process's resident memory, after memory
    freed earlier was returned to the system; small networks are lost in its noise of about a megabyte.
    Elsewhere it is not measured.

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
    """Return free memory to the system, reset the high-water mark, and read the memory in use."""
    if not sys.platform.startswith("linux"):
        return None
    gc.collect()
    # Another C library may retain freed memory, which makes the figure a little smaller.
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
    """Count the numbers in a posterior's file or folder of draws, as written by `Posterior.save`."""
    files = sorted(posterior.glob("draw-*.safetensors")) if posterior.is_dir() else [posterior]
    return sum(t.numel() for file in files for t in read_tensors(file)[1].values())
