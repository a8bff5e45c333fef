"""The one error of this package that is the data's fault and not the program's."""

from __future__ import annotations

__all__ = ["DataError"]


class DataError(ValueError):
    """A data file is missing, cut short, damaged, or does not say what its format promises.

    The message is one sentence that names the file or folder and says what to do.
    """
