"""Reading of text and archives that somebody else may have written: with limits, and with checksums.

A file that is missing, too large, too deep, of another format or changed since it was written raises a
`FileError`: one sentence that names the file, what is wrong and what to do.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbayes.core.errors import FileError
from torchbayes.core.storage import json_checksum

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "check_inflation", "is_number", "json_line", "json_lines", "read_json", "read_json_lines", "read_npz",
    "read_text", "read_toml", "toml_text",
]  # fmt: skip

_LARGEST_TEXT = 1 << 26
_LARGEST_TOML = 1 << 22
# An archive may inflate to this size, or to this many times its own if that is more.
_INFLATED, _TIMES = 1 << 28, 100
_SURROGATE = re.compile(r"\\u[dD][89abAB]")
_CRC = re.compile(r"[0-9a-f]{8}")
_TOML_END = re.compile(r"# crc32 = ([0-9a-f]{8})\n?\Z")


def read_text(path: Path, remedy: str, most: int = _LARGEST_TEXT) -> str:
    """Return the text of an ordinary file of at most `most` bytes.

    Args:
        path: The file.
        remedy: What to do if it cannot be read, for messages.
        most: Largest size in bytes.
    """
    try:
        if not path.exists():
            raise FileError(f"there is no file {path}: {remedy}")
        if not path.is_file():
            raise FileError(f"{path} is not an ordinary file: {remedy}")
        size = path.stat().st_size
        if size > most:
            raise FileError(f"{path} has {size:,} bytes, more than {most:,}: {remedy}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is damaged, it is not text: {remedy}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from error


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file; one of `write_json` is checked against its checksum.

    Args:
        path: The file.
        remedy: What to do if it cannot be used, for messages.
    """
    try:
        text = read_text(path, remedy)
        content = json.loads(text)
        if _SURROGATE.search(text):  # half a character, which no file can be written with
            json.dumps(content, ensure_ascii=False).encode()
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read as JSON ({_short(error)}): {remedy}") from error
    if isinstance(content, dict):
        _check(content, f"{path}", remedy)
    return content


def json_line(row: Mapping[str, Any]) -> str:
    """Return a table as a line of JSON with its checksum."""
    return json.dumps({**row, "crc32": json_checksum(row)})


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return tables as lines of JSON with checksums, and a last line that counts them."""
    return "".join(json_line(row) + "\n" for row in [*rows, {"end": len(rows)}])


def read_json_lines(path: Path, remedy: str, *, whole: bool = False) -> list[dict[str, Any]]:
    """Read a file with a JSON table in every line, and check each against its checksum if it has one.

    A last line without an end, which a kill has cut short, is left out.

    Args:
        path: The file; one that does not exist has no lines.
        remedy: What to do if it cannot be used, for messages.
        whole: Whether the file is one of `json_lines`, whose last line counts the others.
    """
    if not path.exists():
        return []
    *lines, rest = read_text(path, remedy).split("\n")
    rows: list[dict[str, Any]] = []
    sealed: set[bool] = set()  # either all lines have a checksum or none has
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a table")
        except (ValueError, RecursionError) as error:
            if number > len(lines) and not whole:
                break
            raise FileError(
                f"{path} is damaged in line {number} ({_short(error)}): {remedy}"
            ) from error
        sealed.add("crc32" in row)
        if len(sealed) > 1:
            raise FileError(f"{path} is damaged in line {number}, it has no checksum: {remedy}")
        _check(row, f"{path}, line {number},", remedy)
        rows.append(row)
    if whole and (not rows or (True in sealed and rows.pop() != {"end": len(rows)})):
        raise FileError(f"{path} has been cut short or damaged: {remedy}")
    return rows


def _check(table: dict[str, Any], where: str, remedy: str) -> None:
    """Take the checksum out of a table and compare; a table without one may have been written by hand."""
    if "crc32" not in table:
        last = next(reversed(table.values()), None)
        # The name is gone, and perhaps what stood before it.
        if isinstance(last, str) and _CRC.fullmatch(last):
            raise FileError(
                f"{where} has been damaged, it ends in a checksum without a name: {remedy}"
            )
        return
    wanted = table.pop("crc32")
    try:
        found = json_checksum(table)
    except RecursionError:
        found = ""
    if wanted != found:
        raise FileError(
            f"{where} has been damaged or edited, its checksum does not fit: {remedy} (or remove the "
            "entry crc32 if the change is meant)"
        )


def toml_text(text: str) -> str:
    """Return TOML with its checksum as a comment in the last line."""
    return f"{text}# crc32 = {zlib.crc32(text.encode()):08x}\n"


def read_toml(
    path: Path, remedy: str = "check the path and the file", sealed: str | None = None
) -> dict[str, Any]:
    """Read a TOML file; one with a checksum in its last line is checked against it.

    Args:
        path: The file.
        remedy: What to do if it cannot be used, for messages.
        sealed: Key that only files with a checksum have: with it and without one, a file is cut short.
    """
    text = read_text(path, remedy, _LARGEST_TOML)
    end = _TOML_END.search(text)
    if end is not None and f"{zlib.crc32(text[: end.start()].encode()):08x}" != end[1]:
        raise FileError(f"{path} has been damaged or edited, its checksum does not fit: {remedy}")
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{path} is not valid TOML: {_short(error)}") from error
    if end is None and sealed in content:
        raise FileError(f"{path} has been damaged or edited, it has no checksum: {remedy}")
    return content


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number: no truth value, and none whose sums overflow."""
    if type(value) is float and not math.isfinite(value):
        return True
    return type(value) in (int, float) and abs(value) <= 1e300


def read_npz(path: Path, remedy: str) -> dict[str, npt.NDArray[Any]]:
    """Read a NumPy archive of plain arrays; never unpickles, and takes no more memory than is there.

    Args:
        path: The file.
        remedy: What to do if it cannot be used, for messages.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            check_inflation(path, sum(entry.file_size for entry in entries))
            for entry in entries:
                with archive.open(entry) as stream:
                    _check_array_header(archive, entry)
                    array = np.lib.format.read_array(stream, allow_pickle=False)
                    if stream.read(1):  # also makes zipfile compare the checksum
                        raise ValueError("there is more than its header describes")
                    arrays[entry.filename.removesuffix(".npy")] = array
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}: {remedy}") from error
    except FileError:
        raise
    # zipfile, zlib and NumPy pass on whatever their parsers raise, tokenize.TokenError among others.
    except Exception as error:
        raise FileError(f"{path} is damaged ({_short(error)}): {remedy}") from error
    return arrays


def _check_array_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Hold the size that an array's header claims against that of its entry, before memory is taken."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"array format {version} is not known")
        if math.prod(shape) * dtype.itemsize + stream.tell() != entry.file_size:
            raise ValueError("an array's header does not fit its size")


def check_inflation(path: Path, inflated: int) -> None:
    """Raise a `FileError` if a compressed file claims to be absurdly large."""
    if inflated > max(_INFLATED, _TIMES * path.stat().st_size):
        raise FileError(
            f"{path} would inflate to {inflated:,} bytes, {_TIMES} times its size: it is damaged or was "
            "made to fill the memory; get it again"
        )


def _short(error: BaseException) -> str:
    """Return the first line of an error's text, not too long."""
    lines = str(error).splitlines() or [type(error).__name__]
    return "too deeply nested" if isinstance(error, RecursionError) else lines[0][:200]
