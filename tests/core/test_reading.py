"""Text and archives of unknown origin: what is wrong is named in one sentence, and memory stays small."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchbayes.core.errors import FileError
from torchbayes.core.reading import (
    json_line,
    read_json,
    read_json_lines,
    read_npz,
    read_toml,
    toml_text,
)
from torchbayes.core.storage import write_json

CONTENT = {"nll": 0.1, 4: [1, None, "ε"], "deep": {"a": -0.0, "b": 1e300}}


def refused(message: str, read: Any, file: Path) -> None:
    with pytest.raises(FileError, match=message) as error:
        read(file, "make it again")
    text = str(error.value)
    assert str(file) in text
    assert "\n" not in text


def test_json_comes_back_without_its_checksum(tmp_path: Path) -> None:
    write_json(tmp_path / "file", CONTENT)
    assert read_json(tmp_path / "file", "") == json.loads(json.dumps(CONTENT))
    assert json.loads((tmp_path / "file").read_text())["crc32"]
    (tmp_path / "hand").write_text('{"nll": 1}')
    assert read_json(tmp_path / "hand", "") == {"nll": 1}


def test_every_changed_digit_of_json_is_noticed(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {"accuracy": 0.9312, "seconds": 17})
    text = (tmp_path / "file").read_text()
    for place in [i for i, c in enumerate(text) if c.isdigit()]:
        other = "7" if text[place] != "7" else "1"
        (tmp_path / "file").write_text(text[:place] + other + text[place + 1 :])
        refused("make it again", read_json, tmp_path / "file")


def test_a_piece_that_is_cut_out_with_the_name_of_the_checksum_is_noticed(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {"draws": 4, "predictions": {"rhat": 1.01}, "seconds": 17})
    raw = (tmp_path / "file").read_bytes()
    sound, read = read_json(tmp_path / "file", ""), 0
    for place in range(len(raw)):
        for length in (1, 2, 8, 16, 32, 64):
            (tmp_path / "file").write_bytes(raw[:place] + raw[place + length :])
            try:
                assert read_json(tmp_path / "file", "make it again") == sound
                read += 1
            except FileError:
                continue
    assert read > 0  # white space


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "too deeply nested"),
        (b'{"a": ', "cannot be read as JSON"),
        (b"\xff\xfe", "not text"),
        (b'{"a": "\\ud800"}', "cannot be read as JSON"),
        (b"9" * 10_000, "cannot be read as JSON"),
        (b" " * ((1 << 26) + 1), "more than 67,108,864"),
    ],
    ids=["deep", "cut", "bytes", "surrogate", "digits", "large"],
)
def test_json_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(message, read_json, tmp_path / "file")


def test_what_is_no_file(tmp_path: Path) -> None:
    for read in (read_json, read_toml):
        refused("there is no file", read, tmp_path / "missing")
        refused("not an ordinary file", read, tmp_path)
    refused("not an ordinary file", read_json, Path("/dev/zero"))


def test_lines_with_checksums(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert read_json_lines(file, "") == []
    rows = [{"epoch": e, "loss": 1 / e} for e in (1, 2, 3)]
    whole = "".join(json_line(row) + "\n" for row in rows)
    file.write_text(whole)
    assert read_json_lines(file, "") == rows
    file.write_text(whole[:-20])  # a kill in the middle of the last line
    assert read_json_lines(file, "") == rows[:2]
    file.write_text(whole.replace("0.5", "0.4"))
    refused("line 2, has been damaged or edited", read_json_lines, file)
    file.write_text(whole.replace('{"epoch": 2', '"epoch": 2'))
    refused("damaged in line 2", read_json_lines, file)


def test_toml_with_a_checksum(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(toml_text('epochs = 30\nname = "ε"\n'))
    assert read_toml(file) == {"epochs": 30, "name": "ε"}
    file.write_text(file.read_text().replace("30", "10"))
    refused("damaged or edited", read_toml, file)
    file.write_text("epochs = 10\n")  # written by hand
    assert read_toml(file) == {"epochs": 10}
    file.write_text("a = " + "[" * 10_000)
    refused("not valid TOML", read_toml, file)


def archive(file: Path, arrays: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", how) as written:
        for name, content in arrays.items():
            written.writestr(f"{name}.npy", content)
    return file


def stored(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_archives_come_back(tmp_path: Path) -> None:
    arrays = {"probs": np.random.default_rng(0).random((5, 3), np.float32), "draws": np.array(7)}
    file = archive(tmp_path / "file", {k: stored(v) for k, v in arrays.items()})
    back = read_npz(file, "")
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_archives_that_would_fill_the_memory(tmp_path: Path) -> None:
    zeros = archive(tmp_path / "bomb", {"x": stored(np.zeros(300 << 20, np.uint8))})
    assert zeros.stat().st_size < 1 << 20
    refused("would inflate to", read_npz, zeros)
    header = stored(np.zeros(4)).replace(b"(4,), }        ", b"(400000000,), }")
    assert b"(400000000,), }" in header
    refused("does not fit its size", read_npz, archive(tmp_path / "lie", {"x": header}))


def test_archives_that_are_damaged(tmp_path: Path) -> None:
    raw = archive(tmp_path / "file", {"x": stored(np.arange(100.0))}).read_bytes()
    for place in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[place] ^= 0x55
        (tmp_path / "file").write_bytes(changed)
        try:
            back = read_npz(tmp_path / "file", "")
        except FileError:
            continue
        # A field that nobody uses, such as the time, may change.
        assert all(np.array_equal(array, np.arange(100.0)) for array in back.values())
    objects = stored(np.zeros(1)).replace(b"'<f8'", b"'|O' ")
    refused("is damaged", read_npz, archive(tmp_path / "pickle", {"x": objects}))
