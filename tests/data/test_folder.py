from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchbayes.data import (
    DataError,
    ImageFolder,
    Split,
    folder,
    image_sets,
    load_data,
    read_image,
)
from torchbayes.data.folder import _EXTENSIONS


def picture(path: Path, value: int | np.ndarray, size: tuple[int, int] = (8, 8), mode: str = "RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, np.ndarray):
        Image.fromarray(value).save(path)
    else:
        Image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Three classes of 10, 5 and 2 images whose pixels tell class and number."""
    for number, (name, count) in enumerate((("ant", 10), ("bee", 5), ("cow", 2))):
        for i in range(count):
            picture(tmp_path / "data" / name / f"{i:02}.png", 20 * number + i)
    return tmp_path / "data"


@pytest.mark.parametrize("prefix", ["", "folder:"])
def test_class_folders_become_a_data_set(flat: Path, prefix: str) -> None:
    data = load_data(f"{prefix}{flat}")
    assert data.classes == ("ant", "bee", "cow")
    assert data.shape == (3, 8, 8)
    assert isinstance(data.train, Split)
    assert torch.bincount(data.test.targets).tolist() == [2, 1, 1]
    assert torch.bincount(data.train.targets).tolist() == [8, 4, 1]
    pixels = torch.cat([data.train.inputs, data.test.inputs])[:, 0, 0, 0].tolist()
    assert sorted(pixels) == [*range(10), *range(20, 25), 40, 41]
    for split in (data.train, data.test):
        assert torch.equal(split.inputs[:, 0, 0, 0].long() // 20, split.targets)


def test_the_test_split_does_not_depend_on_the_seed(flat: Path) -> None:
    left, right = (load_data(f"folder:{flat}", seed=s, validation=3) for s in (0, 1))
    assert torch.equal(left.test.inputs, right.test.inputs)
    assert not torch.equal(left.validation.inputs, right.validation.inputs)


@pytest.mark.parametrize(
    ("parts", "test", "validation"),
    [
        (("train", "test"), "test", None),
        (("train", "val"), "val", None),
        (("train", "val", "test"), "test", "val"),
    ],
)
def test_split_folders(
    tmp_path: Path, parts: tuple[str, ...], test: str, validation: str | None
) -> None:
    values = {"train": 10, "val": 20, "test": 30}
    for part in parts:
        for name in ("a", "b"):
            picture(tmp_path / part / name / "deep" / "x.JPG", values[part])
    data = load_data(str(tmp_path), stream=True)
    assert isinstance(data.train, ImageFolder)
    assert data.train.path(0).parts[-4] == "train"
    assert data.test.path(1).parts[-4:-1] == (test, "b", "deep")
    if validation is None:
        assert data.validation is None
    else:
        assert data.validation.path(0).parts[-4] == validation
        with pytest.raises(ValueError, match="already has a validation split"):
            load_data(str(tmp_path), validation=1)


def test_large_folders_are_streamed(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 17 * 3 * 8 * 8
    monkeypatch.setattr(image_sets, "STREAM_ABOVE", size)
    assert isinstance(load_data(f"folder:{flat}").train, Split)
    monkeypatch.setattr(image_sets, "STREAM_ABOVE", size - 1)
    streamed = load_data(f"folder:{flat}", validation=4, seed=1)
    memory = load_data(f"folder:{flat}", validation=4, seed=1, stream=False)
    for name in ("train", "validation", "test"):
        left, right = getattr(streamed, name), getattr(memory, name)
        assert isinstance(left, ImageFolder)
        assert torch.equal(torch.stack([left[i][0] for i in range(len(left))]), right.inputs)
        assert torch.equal(left.targets, right.targets)


def test_grey_folders_have_one_channel_and_sizes_follow_the_images(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(5):
            picture(tmp_path / name / f"{i}.png", 50, size=(28, 40), mode="L")
    data = load_data(f"folder:{tmp_path}")
    assert data.shape == (1, 28, 28)
    assert load_data(f"folder:{tmp_path}", size=16).shape == (1, 16, 16)
    picture(tmp_path / "a" / "colour.png", 50, size=(300, 300))
    assert load_data(f"folder:{tmp_path}").shape == (3, 28, 28)


def test_images_are_cropped_to_the_centre_and_scaled(tmp_path: Path) -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 200
    picture(tmp_path / "wide.png", wide)
    assert (read_image(tmp_path / "wide.png", (3, 4, 4)) == 200).all()
    exact = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    picture(tmp_path / "exact.png", exact)
    read = read_image(tmp_path / "exact.png", (3, 4, 6))
    np.testing.assert_array_equal(read.permute(1, 2, 0).numpy(), exact)
    halved = read_image(tmp_path / "exact.png", (3, 2, 3)).double()
    # A smaller version of any image keeps its mean, up to the filter's treatment of the borders.
    assert abs(halved.mean() - exact.mean()) < 20


def test_an_image_that_would_fill_the_memory(tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 1 << 20
    with pytest.raises(
        DataError, match=r"bomb\.png could not be read \(9000 × 9000 pixels are more"
    ):
        read_image(tmp_path / "bomb.png", (1, 8, 8))


def test_no_image_starts_a_program(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "programs" / "gs"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho ran >> {tmp_path / 'ran'}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # found anew
    evil = flat / "cow" / "evil.png"
    Image.new("RGB", (8, 8)).save(evil, format="EPS")
    with pytest.raises(DataError, match=r"evil\.png.*none of the formats PNG"):
        read_image(evil, (3, 8, 8))
    with pytest.raises(DataError, match=r"evil\.png.*none of the formats PNG"):
        load_data(f"folder:{flat}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", _EXTENSIONS)
def test_every_ending_has_a_format(tmp_path: Path, ending: str) -> None:
    Image.new("L", (8, 8), 7).save(tmp_path / f"a{ending}")
    assert read_image(tmp_path / f"a{ending}", (1, 8, 8)).float().mean() == pytest.approx(7, abs=2)


def test_odd_kinds_of_images(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(tmp_path / "alpha.png")
    assert read_image(tmp_path / "alpha.png", (3, 4, 4))[:, 0, 0].tolist() == [10, 20, 30]
    Image.fromarray(np.full((4, 4), 30000, np.uint16)).save(tmp_path / "deep.png")
    assert (read_image(tmp_path / "deep.png", (1, 4, 4)) == 30000 // 256).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 7, 8, 9])
    palette.save(tmp_path / "palette.png", transparency=b"\x00\xff")
    assert read_image(tmp_path / "palette.png", (3, 4, 4))[:, 0, 0].tolist() == [7, 8, 9]
    Image.new("1", (4, 4), 1).save(tmp_path / "bits.png")
    assert (read_image(tmp_path / "bits.png", (1, 4, 4)) == 255).all()


@pytest.mark.parametrize("stream", [True, False])
def test_a_corrupt_image_is_named(flat: Path, stream: bool) -> None:
    bad = flat / "bee" / "03.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    with pytest.raises(DataError, match=f"the image {bad} could not be read") as caught:
        load_data(f"folder:{flat}", stream=stream)
    assert "\n" not in str(caught.value)


def test_a_truncated_photograph_is_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.jpg")
    whole = (tmp_path / "x.jpg").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text"):
        (tmp_path / "x.jpg").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.jpg could not be read"):
            read_image(tmp_path / "x.jpg", (3, 8, 8))
    with pytest.raises(DataError, match=r"y\.jpg does not exist"):
        read_image(tmp_path / "y.jpg", (3, 8, 8))


def test_folders_that_are_no_data_set(tmp_path: Path) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(DataError, match=sentence):
            load_data(f"folder:{tmp_path}")

    with pytest.raises(DataError, match="nowhere does not exist"):
        load_data(f"folder:{tmp_path}/nowhere")
    refused("has 0 class subfolders")
    picture(tmp_path / "a" / "x.png", 1)
    refused("has 1 class subfolders")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("no image")
    refused("b has no images")
    picture(tmp_path / "b" / "x.png", 1)
    refused("no class of this image folder has two images")
    (tmp_path / "a" / "x.png").unlink()
    (tmp_path / "b" / "x.png").unlink()
    refused("has no images in its class subfolders")


def test_split_folders_that_do_not_fit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "train" / name / "x.png", 1)
    with pytest.raises(DataError, match="no folder 'test' or 'val'"):
        load_data(f"folder:{tmp_path}")
    picture(tmp_path / "test" / "c" / "x.png", 1)
    with pytest.raises(DataError, match="class 'c' that the training images do not have"):
        load_data(f"folder:{tmp_path}")


def test_splits_without_classes_are_not_taken_for_classes(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "x.png", 1)
    picture(tmp_path / "test" / "x.png", 1)
    with pytest.raises(DataError, match="train has no class subfolders"):
        load_data(f"folder:{tmp_path}")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "tram"):
        for i in range(2):
            picture(tmp_path / name / f"{i}.png", 1)
    assert load_data(f"folder:{tmp_path}").classes == ("train", "tram")


def test_size_and_stream_are_for_folders(flat: Path) -> None:
    with pytest.raises(ValueError, match="size=8 is for folders"):
        load_data("digits", size=8)
    with pytest.raises(ValueError, match="stream=True is for folders"):
        load_data("digits", stream=True)
    with pytest.raises(ValueError, match="image size is 0"):
        load_data(f"folder:{flat}", size=0)


def test_the_digest_of_a_folder_tells_other_images(flat: Path) -> None:
    def found() -> str:
        return load_data(f"folder:{flat}").digest

    before = found()
    # A part of the data has the digest of the whole, as its settings say which part it is.
    assert found() == before == load_data(f"folder:{flat}", validation=3).digest
    picture(flat / "ant" / "10.png", 99)
    grown = found()
    picture(flat / "ant" / "10.png", 98)
    assert len({before, grown, found()}) == 3


def test_the_digest_of_streamed_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_READ", 2)
    for number in range(5):
        picture(tmp_path / f"{number}.bmp", number)

    def found(count: int = 5) -> str:
        files = np.array([f"{number}.bmp".encode() for number in range(count)])
        return ImageFolder(tmp_path, files, torch.zeros(count), (3, 8, 8)).digest()

    before = found()
    assert found() == before != found(4)
    picture(tmp_path / "1.bmp", 9)  # of the same size, and not among those that are read
    assert found() == before
    picture(tmp_path / "3.bmp", 9)
    assert found() != before
    (tmp_path / "2.bmp").unlink()
    with pytest.raises(DataError, match=r"2\.bmp cannot be read"):
        found()
