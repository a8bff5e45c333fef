"""Downloads from a server on this machine that breaks off, lies and refuses."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchbayes.data import DataError, cifar, load_data, mnist, svhn
from torchbayes.data.download import fetch, unpack

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def mnist_online(
    server: Any, mnist_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Any:
    server.files.update(mnist_files)
    remote = tuple(server.remote(name, content) for name, content in mnist_files.items())
    monkeypatch.setattr(mnist, "MNIST", replace(mnist.MNIST, remote=remote))
    return server


def test_a_file_arrives_whole_and_is_not_fetched_again(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT
    remote = server.remote("x.bin", CONTENT)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.requests == [("x.bin", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_a_broken_connection_is_continued_where_it_broke(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT
    server.break_after["x.bin"] = [100_000, 50_000]
    assert fetch(server.remote("x.bin", CONTENT), tmp_path).read_bytes() == CONTENT
    assert server.requests == [
        ("x.bin", None),
        ("x.bin", "bytes=100000-"),
        ("x.bin", "bytes=150000-"),
    ]


def test_a_later_run_continues_what_an_earlier_one_left(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT
    (tmp_path / "x.bin.part").write_bytes(CONTENT[:70_000])
    assert fetch(server.remote("x.bin", CONTENT), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("x.bin", "bytes=70000-")]


def test_a_part_that_was_already_whole_is_taken(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT
    (tmp_path / "x.bin.part").write_bytes(CONTENT)
    assert fetch(server.remote("x.bin", CONTENT), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("x.bin", "bytes=256000-")]


@pytest.mark.parametrize("length", [1000, 300_000])
def test_a_part_of_something_else_is_given_up(server: Any, tmp_path: Path, length: int) -> None:
    server.files["x.bin"] = CONTENT
    (tmp_path / "x.bin.part").write_bytes(b"?" * length)
    assert fetch(server.remote("x.bin", CONTENT), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("x.bin", None)


def test_a_server_without_ranges_starts_over(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT
    server.ranges = False
    server.break_after["x.bin"] = [100_000]
    assert fetch(server.remote("x.bin", CONTENT), tmp_path).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_connection_that_always_breaks_is_given_up_but_the_part_kept(
    server: Any, tmp_path: Path
) -> None:
    server.files["x.bin"] = CONTENT
    server.break_after["x.bin"] = [1000] + [0] * 20
    with pytest.raises(DataError, match=r"x\.bin could not be downloaded .*broke off"):
        fetch(server.remote("x.bin", CONTENT), tmp_path)
    assert (tmp_path / "x.bin.part").read_bytes() == CONTENT[:1000]
    assert not (tmp_path / "x.bin").exists()
    assert len(server.requests) < 8


def test_a_wrong_checksum_is_said_and_the_file_removed(server: Any, tmp_path: Path) -> None:
    server.files["x.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="its checksum is not the published one"):
        fetch(server.remote("x.bin", CONTENT), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_mirrors_are_tried_in_turn(server: Any, tmp_path: Path) -> None:
    server.files["good/x.bin"] = CONTENT
    server.files["wrong/x.bin"] = b"a login page"
    remote = server.remote("x.bin", CONTENT, mirrors=("gone/", "wrong/", "good/"))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert [name for name, _ in server.requests] == ["gone/x.bin", "wrong/x.bin", "good/x.bin"]
    del server.files["good/x.bin"]
    with pytest.raises(DataError, match=r"HTTP status 404; .*checksum.*; .*HTTP status 404"):
        fetch(remote, tmp_path / "again")


def test_a_mirror_continues_what_another_began(server: Any, tmp_path: Path) -> None:
    server.files["a/x.bin"] = server.files["b/x.bin"] = CONTENT
    server.break_after["a/x.bin"] = [1000] + [0] * 20
    remote = server.remote("x.bin", CONTENT, mirrors=("a/", "b/"))
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("b/x.bin", "bytes=1000-")


def test_nothing_listening_is_no_connection(server: Any, tmp_path: Path) -> None:
    remote = replace(server.remote("x.bin", CONTENT), mirrors=("http://127.0.0.1:1/x.bin",))
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/x\.bin: no connection"):
        fetch(remote, tmp_path)


def test_a_data_set_is_downloaded_once_into_the_cache(mnist_online: Any, cache: Path) -> None:
    assert load_data("mnist").train_size == 30
    assert load_data("mnist", download=False).train_size == 30
    assert len(mnist_online.requests) == 4
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(mnist_online.files)


def test_processes_of_one_job_do_not_disturb_each_other(mnist_online: Any, cache: Path) -> None:
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda: sizes.append(load_data("mnist").train_size))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [30] * 4
    assert len(mnist_online.requests) == 4


def test_an_archive_is_unpacked_whole_and_only_its_named_files(
    server: Any, cache: Path, cifar_archive: bytes, cifar_files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server.files["cifar-10-binary.tar.gz"] = cifar_archive
    remote = server.remote("cifar-10-binary.tar.gz", cifar_archive)
    monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, remote=(remote,)))
    assert load_data("cifar10").train_size == 20
    assert load_data("cifar10", download=False).train_size == 20
    left = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert sorted(path.name for path in left) == sorted(cifar_files)
    assert not (cache.parent / "escaped.txt").exists()


def test_a_damaged_archive_leaves_no_folder(tmp_path: Path, cifar_archive: bytes) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(cifar_archive[: len(cifar_archive) // 2])
    members = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
    with pytest.raises(DataError, match="is damaged or half-downloaded"):
        unpack(archive, members, tmp_path / "out")
    with tarfile.open(archive, "w:gz"):
        pass
    with pytest.raises(DataError, match="is damaged or half-downloaded"):
        unpack(archive, members, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_svhn_over_the_network(
    server: Any, cache: Path, svhn_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files.update(svhn_files)
    remote = tuple(server.remote(name, content) for name, content in svhn_files.items())
    monkeypatch.setattr(svhn, "SVHN", replace(svhn.SVHN, remote=remote))
    assert len(load_data("svhn").test) == 11


def test_missing_data_say_what_is_missing_and_both_ways_to_provide_it(cache: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_data("mnist", download=False)
    message = str(caught.value)
    for part in ("'mnist'", "t10k-labels-idx1-ubyte.gz", "data_dir", "TORCHBAYES_DATA", "download"):
        assert part in message
    assert "\n" not in message


def test_offline_says_the_same_and_what_each_mirror_said(
    mnist_online: Any, cache: Path, tmp_path: Path
) -> None:
    mnist_online.files.clear()
    with pytest.raises(DataError) as caught:
        load_data("mnist")
    message = str(caught.value)
    for part in ("HTTP status 404", "train-images-idx3-ubyte.gz", "TORCHBAYES_DATA", "network"):
        assert part in message
    assert "\n" not in message


def test_a_complete_named_folder_is_never_downloaded_to(
    mnist_online: Any, cache: Path, tmp_path: Path, mnist_files: dict[str, bytes],
    put: Callable, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put(tmp_path / "mine" / "mnist", mnist_files)
    monkeypatch.setenv("TORCHBAYES_DATA", str(tmp_path / "mine"))
    assert load_data("mnist").train_size == 30
    assert mnist_online.requests == []
    assert not cache.exists()


def test_a_named_folder_with_a_part_of_the_files_is_refused(
    mnist_online: Any, cache: Path, tmp_path: Path, mnist_files: dict[str, bytes], put: Callable
) -> None:
    del mnist_files["t10k-images-idx3-ubyte.gz"]
    put(tmp_path / "mine" / "mnist", mnist_files)
    with pytest.raises(DataError, match=r"only a part of 'mnist' \(missing: t10k-images"):
        load_data("mnist", data_dir=tmp_path / "mine")
    assert mnist_online.requests == []


def test_a_named_folder_must_exist(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_data("mnist", data_dir=tmp_path / "nowhere")


def test_a_cache_that_cannot_be_written_is_said(mnist_online: Any, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cache folder .* could not be used"):
        load_data("mnist")
