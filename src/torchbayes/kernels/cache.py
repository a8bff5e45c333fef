"""numba's cache on disk, with checksums: a damaged or unwritable one costs a few seconds, never a run.

numba unpickles its cache and runs the machine code in it unchecked, and passes on every error of a file that
is cut short or cannot be written. Here a file that does not fit its checksum is compiled again, and one that
cannot be written is left out, each with a line in the log.
"""

# mypy: disallow-untyped-calls=false
from __future__ import annotations

import logging
import pickle
import zlib
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

__all__ = ["keep_compiled"]

_LOG = logging.getLogger("torchbayes")
_SIZE = 4


class _CheckedFiles(IndexDataCacheFile):
    """The files of a function: machine code behind a checksum."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception as error:  # whatever unpickling a damaged file raises
            _note(self._index_path, error)
            Path(self._index_path).unlink(missing_ok=True)
            return {}

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(zlib.crc32(content).to_bytes(_SIZE, "big") + content)

    def _load_data(self, name: str) -> Any:
        path = self._data_path(name)
        content = Path(path).read_bytes()
        if zlib.crc32(content[_SIZE:]).to_bytes(_SIZE, "big") != content[:_SIZE]:
            _note(path, ValueError("its checksum does not fit"))
            raise OSError  # numba's word for: compile it
        return pickle.loads(content[_SIZE:])


class _CheckedCache(FunctionCache):
    """A function's cache whose faults cost no more than its use."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFiles(
            cache_path=self._cache_path,
            # Not numba's own file names: it would read the checksum as code.
            filename_base=f"{self._impl.filename_base}.checked",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled function, or None if it has to be compiled."""
        try:
            return super().load_overload(signature, context)
        except Exception as error:
            _note(self._cache_path, error)
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        """Save the compiled function if that is possible."""
        try:
            super().save_overload(signature, data)
        except Exception as error:
            _LOG.warning(
                "compiled loops cannot be kept in %s (%s): every process compiles them anew; free some space "
                "or set NUMBA_CACHE_DIR to a writable folder",
                self._cache_path, error,
            )  # fmt: skip


def keep_compiled(function: Any) -> None:
    """Let a function of `numba.njit` keep what it compiles on disk, if there is a place for it."""
    try:
        function._cache = _CheckedCache(function.py_func)
    except RuntimeError:  # there is no folder to cache it in
        _LOG.info("there is no folder for compiled loops: every process compiles them anew")


def _note(path: str, error: BaseException) -> None:
    _LOG.warning(
        "%s is damaged (%s): the loop is compiled again", path, str(error) or type(error).__name__
    )
