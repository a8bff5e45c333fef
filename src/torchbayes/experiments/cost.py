"""Cost of a run: peak memory of training, and how many numbers the posterior stores."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import read_tensors

__all__ = ["PeakMemory", "peak_memory", "read_peak", "stored_numbers"]


class PeakMemory:
    """Peak memory in bytes of the code inside `peak_memory`; None where it cannot be measured."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device | None = None) -> Iterator[PeakMemory]:
    """Measure how much memory the code inside takes on top of what was in use before.

    On a GPU, what torch allocated there. On Linux, the rise of the process's resident memory, after memory
    freed earlier was returned to the system, without pages of files: the system loads those of libraries and
    drops them as it likes. Small networks are lost in the noise of about a megabyte. Elsewhere it is not
    measured.

    Args:
        device: Device that the code computes on; the GPU, if there is one, if None.

    Example:
        >>> with peak_memory() as peak:
        ...     _ = torch.ones(25_000_000)
        >>> peak.bytes is None or peak.bytes > 90_000_000
        True
    """
    peak = PeakMemory()
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    start = _start()
    yield peak
    if start is not None:
        end = _resident("VmHWM", "RssFile")
        files = end["RssFile"] - start["RssFile"]
        peak.bytes = max(0, end["VmHWM"] - start["VmRSS"] - max(0, files))


def _start() -> dict[str, int] | None:
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
    found = _resident("VmRSS", "RssFile", "VmHWM")
    return found if len(found) == 3 else None


def _resident(*fields: str) -> dict[str, int]:
    """Return figures on the memory of this process in bytes, as far as the system has them."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.split() for line in status.splitlines())
    named = {line[0].rstrip(":"): line for line in lines if len(line) > 1}
    return {field: 1024 * int(named[field][1]) for field in fields if field in named}


def read_peak(file: Path, remedy: str) -> int:
    """Return the peak memory that a run's cost.json holds.

    Args:
        file: The file.
        remedy: What to do if it cannot be used, for messages.
    """
    content = read_json(file, remedy)
    peak = content.get("peak_memory") if isinstance(content, dict) else None
    if not isinstance(peak, int) or not 0 <= peak < 2**63:
        raise FileError(f"{file} is damaged, its peak_memory is {peak!r:.50}: {remedy}")
    return peak


def stored_numbers(posterior: Path) -> int:
    """Count the numbers in a posterior's file or folder of draws, as written by `Posterior.save`."""
    files = sorted(posterior.glob("draw-*.safetensors")) if posterior.is_dir() else [posterior]
    return sum(t.numel() for file in files for t in read_tensors(file)[1].values())
