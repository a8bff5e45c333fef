"""Files are whole or absent, damage never passes unnoticed, and nothing in them runs."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import signal
import stat
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import torchbayes as tb
from torchbayes.core import storage
from torchbayes.core.errors import WriteError
from torchbayes.core.storage import (
    atomic_path,
    read_tensors,
    remove_strays,
    write_tensors,
    write_text,
)

TENSORS = {
    "mean/a": torch.tensor([1.0, -2.0]),
    "mean/bf16": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),
    "mean/half": torch.ones(3, dtype=torch.float16),
    "mean/double": torch.tensor(0.1, dtype=torch.float64),
    "mean/steps": torch.tensor(7),
    "mean/flags": torch.tensor([True, False]),
    "mean/bytes": torch.arange(3, dtype=torch.uint8),
    "mean/empty": torch.empty(0, 3),
}


def write(path: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "kind": "point",
        "model_name": "Net",
        "settings": {"p": 0.5, "layers": ["a", "b"]},
    }
    write_tensors(path, TENSORS, **(arguments | changes))
    return path


def write_header(path: Path, header: Any) -> Path:
    """A sound safetensors file with whatever header."""
    tensors = {"mean/a": torch.ones(2)}
    save_file(tensors, str(path), metadata={"torchbayes": json.dumps(header)})
    return path


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    header, tensors = read_tensors(write(tmp_path / "file"))
    assert list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert header["kind"] == "point"
    assert header["model"] == "Net"
    assert header["torchbayes"] == tb.__version__
    assert header["shapes"]["mean/bf16"] == [2, 1]
    assert header["settings"] == {"p": 0.5, "layers": ["a", "b"]}


def test_views_strides_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "same": base,
        "transposed": base.t(),
        "rows": base[1:],
        "column": base[:, 1],
        "expanded": base[:1].expand(5, 4),
        "gradient": torch.nn.Parameter(base.clone()),
        "none": base[:0],
        "nothing": base[:, :0],
    }
    write_tensors(tmp_path / "file", tensors, kind="k", model_name="", settings={})
    _, back = read_tensors(tmp_path / "file")
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.detach()), name


def test_a_file_takes_no_more_room_than_its_tensors(tmp_path: Path) -> None:
    one_row = torch.zeros(1000, 1000)[:1]
    write_tensors(tmp_path / "file", {"row": one_row}, kind="k", model_name="", settings={})
    assert (tmp_path / "file").stat().st_size < 4 * 1000 + 1000


@pytest.mark.parametrize("end", [0, 1, 7, 8, 9, 100, -100, -17, -1])
def test_a_truncated_file(tmp_path: Path, end: int) -> None:
    raw = write(tmp_path / "whole").read_bytes()
    (tmp_path / "part").write_bytes(raw[:end])
    with pytest.raises(tb.posterior.PosteriorFileError, match="cut short") as error:
        read_tensors(tmp_path / "part")
    one_sentence(error)


def test_a_file_with_something_added(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(tb.posterior.PosteriorFileError, match="damaged"):
        read_tensors(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write(tmp_path_factory.mktemp("flip") / "file")
    return path, path.read_bytes()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_changed_byte_is_noticed(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    path, raw = sound
    position = data.draw(st.integers(0, len(raw) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda new: new != raw[position]))
    damaged = bytearray(raw)
    damaged[position] = value
    path.write_bytes(damaged)
    try:
        header, tensors = read_tensors(path)
    except tb.posterior.PosteriorFileError:
        return
    # Only white space between JSON tokens may change, and then it changes nothing.
    assert chr(value).isspace()
    assert header["settings"] == {"p": 0.5, "layers": ["a", "b"]}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"I32"'),
        (b'"U8"', b'"I8"'),
        (b'\\"Net\\"', b'\\"Not\\"'),
        (b'\\"p\\": 0.5', b'\\"p\\": 0.9'),
        (b'\\"layers\\": [\\"a\\"', b'\\"layers\\": [\\"c\\"'),
        (b'\\"point\\"', b'\\"paint\\"'),
    ],
)
def test_changes_that_leave_a_readable_file(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = write(tmp_path / "file")
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(tb.posterior.PosteriorFileError, match="damaged"):
        read_tensors(path)


class Bomb:
    """Unpickling this leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("how", ["pickle", "torch", "old torch"])
def test_a_pickle_is_refused_and_never_run(tmp_path: Path, how: str) -> None:
    path, trace = tmp_path / "posterior.safetensors", tmp_path / "trace"
    bomb = {"weight": Bomb(trace)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=how == "torch")
    for read in (read_tensors, tb.load):
        with pytest.raises(
            tb.posterior.PosteriorFileError, match="not a safetensors file"
        ) as error:
            read(path)
        one_sentence(error)
    assert not trace.exists()
    with path.open("rb") as file:  # the bomb is a live one
        pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert trace.exists()


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(
            tb.posterior.PosteriorFileError, match="there is no posterior file"
        ) as error:
            read_tensors(path)
        assert str(path) in one_sentence(error)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"torchbayes": "not JSON"},
        {"torchbayes": "[1]"},
        {"torchbayes": '{"format": "other"}'},
        {"torchbayes": "[" * 100_000},
    ],
    ids=["none", "other", "text", "list", "format", "deep"],
)
def test_a_foreign_safetensors_file(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"weight": torch.ones(2)}, str(tmp_path / "file"), metadata=metadata)
    with pytest.raises(
        tb.posterior.PosteriorFileError, match="not a torchbayes posterior"
    ) as error:
        read_tensors(tmp_path / "file")
    one_sentence(error)


@pytest.mark.parametrize("version", [2, 1000, "1", None, 1.5])
def test_a_file_of_a_newer_version(tmp_path: Path, version: Any) -> None:
    header = {"format": "torchbayes-posterior", "version": version, "torchbayes": "9.0.0"}
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=r"torchbayes 9\.0\.0.*upgrade"
    ) as error:
        read_tensors(write_header(tmp_path / "file", header))
    one_sentence(error)


def test_a_message_does_not_quote_a_whole_header(tmp_path: Path) -> None:
    header = {"format": "torchbayes-posterior", "version": 2, "torchbayes": "9\n" * 3000}
    text = json.dumps({"a": "b" * 3000}).encode()
    (tmp_path / "other").write_bytes(struct.pack("<Q", len(text)) + text)
    for file in (write_header(tmp_path / "newer", header), tmp_path / "other"):
        with pytest.raises(tb.posterior.PosteriorFileError) as error:
            read_tensors(file)
        one_sentence(error)
        assert len(str(error.value)) < 500 + len(str(file))


def test_a_header_that_does_not_fit(tmp_path: Path) -> None:
    for more in ({}, {"shapes": {"mean/a": [2]}}, {"shapes": {"mean/a": [3]}, "crc32": 0}):
        header = {"format": "torchbayes-posterior", "version": 1, **more}
        with pytest.raises(tb.posterior.PosteriorFileError, match="damaged"):
            read_tensors(write_header(tmp_path / "file", header))


@pytest.mark.parametrize(("key", "value"), [("kind", 3), ("model_name", None), ("settings", [])])
def test_a_header_without_what_a_reader_needs(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(tb.posterior.PosteriorFileError, match="header lacks the"):
        read_tensors(write(tmp_path / "file", **{key: value}))


def test_an_unreadable_file(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = write(tmp_path / "file")
    path.chmod(0)
    with pytest.raises(tb.posterior.PosteriorFileError):
        read_tensors(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def interrupted() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    write_text(path, "new ε")
    assert path.read_text(encoding="utf-8") == "new ε"
    assert os.listdir(tmp_path) == ["file"]


def test_folders_are_made_and_rights_are_the_usual_ones(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_text(path, "text")
    plain = tmp_path / "plain"
    plain.write_text("text")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    new, old = tmp_path / "bank" / "draw-000000.safetensors", tmp_path / "old"
    write_text(old, "old")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, which this child has no use for
        child = os.fork()
    if child == 0:
        with atomic_path(new) as first, atomic_path(old) as second:
            first.write_text("half")
            second.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not new.exists()
    assert len(tb.Samples(folder=new.parent)) == 0  # what is left is not taken for a draw
    assert old.read_text() == "old"


def test_the_umask_of_other_threads_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_mask: int) -> int:
        raise AssertionError("umask is of the whole process")

    monkeypatch.setattr(os, "umask", forbidden)
    write_text(tmp_path / "file", "text")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "open", "write"])
def test_a_write_that_fails_leaves_the_old_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = write(tmp_path / "file")
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    if call == "write":
        monkeypatch.setattr(storage, "_bytes", fail)
        # The checksum needs the bytes as well.
        monkeypatch.setattr(storage, "checksum", lambda *_: 0)
    else:
        monkeypatch.setattr(storage.os, call, fail)
    with pytest.raises(WriteError, match="could not be written") as error:
        write(path)
    monkeypatch.undo()
    assert os.strerror(number) in one_sentence(error)
    assert error.value.errno == number
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_strays_of_the_dead_are_removed_and_files_in_use_are_not(tmp_path: Path) -> None:
    stray = tmp_path / ".file.0123456789ab.part"
    foreign = tmp_path / ".film.iso.part"  # of another program, in a folder that is not only ours
    for file in (stray, foreign):
        file.write_text("half")
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("whole")
        remove_strays(tmp_path)
        assert not stray.exists()
        assert temporary.exists()
    assert (tmp_path / "file").read_text() == "whole"
    assert foreign.read_text() == "half"


def test_a_file_written_again_leaves_no_strays_of_it(tmp_path: Path) -> None:
    # In any folder, such as that of `--out predictions.csv`: only those that were to become this file.
    name = "n" * 250
    for stray in (f".{'n' * 200}.0123456789ab.part", ".other.0123456789ab.part"):
        (tmp_path / stray).write_text("half")
    write_text(tmp_path / name, "whole")
    assert sorted(os.listdir(tmp_path)) == [".other.0123456789ab.part", name]


def test_weights_that_are_not_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value in (math.nan, math.inf):
        tensors = {"mean/a": torch.tensor([1.0, value])}
        write_tensors(tmp_path / f"{value}", tensors, kind="point", model_name="Net", settings={})
    with pytest.raises(tb.posterior.PosteriorFileError, match="has NaN in 'mean/a'") as error:
        read_tensors(tmp_path / "nan")
    one_sentence(error)
    read_tensors(tmp_path / "inf")  # a mask may be infinite
    assert "infinite values in 'mean/a'" in caplog.text
