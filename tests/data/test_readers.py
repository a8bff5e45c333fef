"""Every reader against bytes that the test wrote itself."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from torchbayes.core.errors import FileError
from torchbayes.data import DataError, load_data
from torchbayes.data.download import read_members
from torchbayes.data.idx import read_idx
from torchbayes.data.svhn import read_svhn

Put = Callable[[Path, dict[str, bytes]], None]
pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_of_any_shape(tmp_path: Path, idx_bytes: Callable, suffix: str) -> None:
    array = np.random.default_rng(0).integers(0, 256, (5, 3, 2))
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(idx_bytes(array)) if suffix else idx_bytes(array))
    np.testing.assert_array_equal(read_idx(path).numpy(), array)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00\x0d\x01" + struct.pack(">I", 1) + b"\0" * 4, "not an IDX file"),
        (b"<html>404</html>", "not an IDX file"),
        (b"\x00\x00\x08\x03\x00\x00", "header promises"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 9) + b"12345678", "8 bytes .* promises 9"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 1) + b"12", "2 bytes .* promises 1"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 0), "no examples"),
    ],
)
def test_bad_idx_files(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_idx(tmp_path / "x")


def test_half_a_gzip_and_a_damaged_one(tmp_path: Path, mnist_files: dict[str, bytes]) -> None:
    whole = mnist_files["train-images-idx3-ubyte.gz"]
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    for content in (whole[: len(whole) // 2], bytes(damaged), b"not gzip at all"):
        (tmp_path / "x.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.gz is damaged or half-downloaded") as caught:
            read_idx(tmp_path / "x.gz")
        assert "\n" not in str(caught.value)


def test_a_bomb_inflates_no_further_than_the_header_promises(
    tmp_path: Path, idx_bytes: Callable
) -> None:
    """Two hundred megabytes of zeros behind a header that promises nine bytes."""
    bomb = gzip.compress(idx_bytes(np.zeros((3, 3), np.uint8)) + bytes(200 << 20))
    (tmp_path / "x.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="10 bytes of data where its header promises 9"):
            read_idx(tmp_path / "x.gz")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def bomb(kind: str, size: int) -> bytes:
    """Zeros in a sound file whose headers say how many there are."""
    count = size // 3072
    if kind == "idx":
        header = b"\0\0\x08\x01" + struct.pack(">I", size)
        return gzip.compress(header + bytes(size), 1)
    buffer = io.BytesIO()
    if kind == "mat":
        images = np.zeros((32, 32, 3, count), np.uint8)
        scipy.io.savemat(buffer, {"X": images, "y": np.ones((count, 1))}, do_compression=True)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
            for name in ("a/1.bin", "a/2.bin"):
                info = tarfile.TarInfo(name)
                info.size = size // 2
                tar.addfile(info, io.BytesIO(bytes(size // 2)))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["idx", "mat", "tar"])
def test_a_bomb_whose_header_tells_the_truth(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 in the place of the 256 megabytes that any archive may inflate to."""
    path = tmp_path / "x.gz"
    read: Callable[[], object] = {
        "idx": lambda: read_idx(path),
        "mat": lambda: read_svhn(path),
        "tar": lambda: read_members(path, ("a/1.bin", "a/2.bin")),
    }[kind]
    path.write_bytes(bomb(kind, 6 << 20))
    monkeypatch.setattr("torchbayes.core.reading._INFLATED", 8 << 20)
    read()
    path.write_bytes(bomb(kind, 60 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=r"x\.gz would inflate to .* made to fill the memory"):
            read()
        assert tracemalloc.get_traced_memory()[1] < 15 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_promises_more_than_any_file_holds(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0\0\x08\x03" + b"\xff" * 12 + b"12345")
    with pytest.raises(DataError, match="5 bytes of data where its header promises"):
        read_idx(tmp_path / "x")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_layout(
    tmp_path: Path, mnist_files: dict[str, bytes], put: Put, name: str, zipped: bool
) -> None:
    files = mnist_files
    if not zipped:
        files = {key[:-3]: gzip.decompress(content) for key, content in files.items()}
    put(tmp_path / name, files)
    data = load_data(name, data_dir=tmp_path, download=False)
    raw = gzip.decompress(mnist_files["train-images-idx3-ubyte.gz"])[16:]
    expected = np.frombuffer(raw, np.uint8).reshape(30, 1, 28, 28)
    np.testing.assert_array_equal(data.train.inputs.numpy(), expected)
    assert data.test.targets.tolist() == [i % 10 for i in range(20)]
    assert data.train.targets.dtype == torch.int64
    assert (data.num_classes, data.shape, data.train_size) == (10, (1, 28, 28), 30)


def test_the_data_sets_own_folder_may_be_named_but_never_the_others(
    tmp_path: Path, mnist_files: dict[str, bytes], put: Put
) -> None:
    put(tmp_path / "mnist", mnist_files)
    assert len(load_data("mnist", data_dir=tmp_path / "mnist", download=False).test) == 20
    with pytest.raises(DataError, match="'fashion-mnist' is not on this machine"):
        load_data("fashion-mnist", data_dir=tmp_path / "mnist", download=False)


def test_images_and_labels_must_match(
    tmp_path: Path, mnist_files: dict[str, bytes], put: Put, idx_bytes: Callable
) -> None:
    put(tmp_path / "mnist", mnist_files)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(29))))
    with pytest.raises(DataError, match=r"\(30, 28, 28\) and \(29,\)"):
        load_data("mnist", data_dir=tmp_path)
    labels.write_bytes(gzip.compress(idx_bytes(np.full(30, 10))))
    with pytest.raises(DataError, match="label 10, but its 10 classes are numbered 0 to 9"):
        load_data("mnist", data_dir=tmp_path)


def test_cifar_records(tmp_path: Path, cifar_files: dict[str, bytes], put: Put) -> None:
    put(tmp_path / "cifar-10-batches-bin", cifar_files)
    data = load_data("cifar10", data_dir=tmp_path, download=False)
    records = np.frombuffer(b"".join(list(cifar_files.values())[:5]), np.uint8).reshape(20, 3073)
    assert data.train.targets.tolist() == records[:, 0].tolist()
    np.testing.assert_array_equal(data.train.inputs.numpy(), records[:, 1:].reshape(20, 3, 32, 32))
    assert len(data.test) == 4
    assert data.classes[6] == "frog"


def test_cifar_straight_from_the_archive(
    tmp_path: Path, cifar_files: dict[str, bytes], cifar_archive: bytes, put: Put
) -> None:
    put(tmp_path / "tar", {"cifar-10-binary.tar.gz": cifar_archive})
    put(tmp_path / "bin" / "cifar-10-batches-bin", cifar_files)
    left = load_data("cifar10", data_dir=tmp_path / "tar", download=False)
    right = load_data("cifar10", data_dir=tmp_path / "bin", download=False)
    assert torch.equal(left.train.inputs, right.train.inputs)
    assert sorted(path.name for path in (tmp_path / "tar").iterdir()) == ["cifar-10-binary.tar.gz"]
    put(tmp_path / "tar", {"cifar-10-binary.tar.gz": cifar_archive[:9000]})
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged or half-downloaded"):
        load_data("cifar10", data_dir=tmp_path / "tar", download=False)


@pytest.mark.parametrize("cut", [1, 3073 * 3 + 5, 0])
def test_cut_cifar_files(tmp_path: Path, cifar_files: dict[str, bytes], put: Put, cut: int) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    put(folder, cifar_files | {"data_batch_2.bin": cifar_files["data_batch_2.bin"][:cut]})
    with pytest.raises(DataError, match=f"data_batch_2.bin has {cut} bytes"):
        load_data("cifar10", data_dir=tmp_path)


def test_cifar_labels_out_of_range(tmp_path: Path, cifar_files: dict[str, bytes], put: Put) -> None:
    put(tmp_path / "cifar-10-batches-bin", cifar_files | {"test_batch.bin": b"\x0b" + b"\0" * 3072})
    with pytest.raises(DataError, match="has the label 11"):
        load_data("cifar10", data_dir=tmp_path)


def test_svhn_axes_and_the_digit_zero(
    tmp_path: Path, svhn_files: dict[str, bytes], put: Put
) -> None:
    put(tmp_path / "svhn", svhn_files)
    data = load_data("svhn", data_dir=tmp_path, download=False)
    images = scipy.io.loadmat(io.BytesIO(svhn_files["train_32x32.mat"]))["X"]
    assert data.train.inputs.shape == (12, 3, 32, 32)
    assert data.train.inputs[5, 2, 7, 11] == images[7, 11, 2, 5]
    assert data.train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert data.augment is not None
    assert not data.augment.flip


def test_bad_svhn_files(tmp_path: Path, svhn_files: dict[str, bytes], put: Put) -> None:
    def matlab(**content: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        scipy.io.savemat(buffer, content)
        return buffer.getvalue()

    pixels = np.zeros((32, 32, 3, 2), np.uint8)
    whole = svhn_files["test_32x32.mat"]
    for content, sentence in (
        (whole[: len(whole) // 2], "is damaged or half-downloaded"),
        (b"", "is damaged or half-downloaded"),
        (b"<html>moved</html>" * 20, "is damaged or half-downloaded"),
        (matlab(X=pixels), "is damaged or half-downloaded"),
        (matlab(X=pixels.astype(float), y=np.ones((2, 1))), "type float64"),
        (matlab(X=pixels, y=np.ones((3, 1))), "2 images but 3 labels"),
        (matlab(X=pixels, y=np.array([[1], [12]])), "label 12"),
    ):
        put(tmp_path / "svhn", svhn_files | {"test_32x32.mat": content})
        with pytest.raises(DataError, match=sentence) as caught:
            load_data("svhn", data_dir=tmp_path)
        assert "\n" not in str(caught.value)
