"""The errors of files: each is one sentence that names the file, says what is wrong and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["FileError", "PosteriorFileError", "RunError", "WriteError"]

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or ask for a larger quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.ENOENT: "do not remove a folder that is being written to",
}


class FileError(ValueError):
    """A file is missing, truncated, damaged, too large, or was written by another program."""


class PosteriorFileError(FileError):
    """A posterior's file is missing, truncated, damaged, of another program or of another model."""


class RunError(FileError):
    """A run folder cannot be used as requested."""


class WriteError(OSError):
    """A file could not be written; what was there before is unchanged."""

    @classmethod
    def of(cls, path: Path, error: BaseException) -> WriteError:
        """Return the error for a file that could not be written because of `error`."""
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number else str(error) or type(error).__name__
        remedy = _REMEDIES.get(number or 0, "choose another folder or check the disk")
        result = cls(
            f"{path} could not be written ({why}): {remedy}; what was there before is unchanged"
        )
        result.errno = number
        return result
