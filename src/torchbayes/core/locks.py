"""Locks that end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchbayes.core.errors import RunError

try:
    import fcntl
except ImportError:  # Windows, where a file that is in use cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

__all__ = ["folder_lock", "lock_file"]

_LOG = logging.getLogger("torchbayes")
_held: set[int] = set()


def lock_file(handle: int) -> bool:
    """Lock an open file, or return False if another process, or another part of this one, has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        _LOG.info("files are not locked (%s)", error.strerror)
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which exists, as long as the block or this process lasts.

    Raises:
        RunError: If the folder is in use.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(folder / ".lock", flags, 0o666)
    except OSError as error:
        raise RunError(
            f"cannot write to {folder} ({error.strerror or error}): choose another output folder"
        ) from error
    try:
        if not lock_file(handle):
            holder = os.read(handle, 20).decode("ascii", "replace").strip()
            by = f"process {holder}" if holder.isdecimal() else "another process"
            raise RunError(
                f"{folder} is in use by {by}: wait until it has ended or choose another folder"
            )
        with contextlib.suppress(OSError):  # a full disk: only the name of the holder is lost
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        _held.add(handle)
        yield
    finally:
        _held.discard(handle)
        with contextlib.suppress(OSError):
            os.close(handle)


def _drop() -> None:
    """Close the locks of the parent: a worker that outlives a killed run must not keep the run's folder."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop)
