"""A damaged, unwritable or missing cache of compiled loops costs time, never a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest

from torchbayes.kernels import cache


def double(x: float) -> float:
    return 2 * x


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    function = numba.njit(double)
    cache.keep_compiled(function)
    function.compile("float64(float64)")
    assert function(3.0) == 6.0
    return function


def hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["cut", "empty", "zeroed", "flipped"])
def test_damaged_files_are_compiled_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ending: str,
    damage: str,
) -> None:
    assert hits(compiled(tmp_path, monkeypatch)) == 0
    assert hits(compiled(tmp_path, monkeypatch)) == 1
    (file,) = tmp_path.rglob(f"*.{ending}")
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "zeroed":
        raw = bytearray(len(raw))
    else:
        # Machine code may be anywhere in the data; an index begins with numba's version.
        raw[len(raw) // 2 if ending == "nbc" else 0] ^= 0xFF
    file.write_bytes(raw)
    assert hits(compiled(tmp_path, monkeypatch)) == 0
    assert "the loop is compiled again" in caplog.text
    assert hits(compiled(tmp_path, monkeypatch)) == 1


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache._CheckedFiles, "_save_data", full)
    assert hits(compiled(tmp_path, monkeypatch)) == 0
    assert "cannot be kept in" in caplog.text
    monkeypatch.undo()
    # The index was written, the data were not.
    assert hits(compiled(tmp_path, monkeypatch)) == 0
