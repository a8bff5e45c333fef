from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from torchbayes.data import (
    DATASETS,
    BatchLoader,
    DataError,
    DataSet,
    Split,
    load_data,
    make_loader,
    noise_for,
    ood_for,
)
from torchbayes.data.dataset import hold_out
from torchbayes.data.ood import shuffle_patches


def rows(inputs: torch.Tensor) -> list[bytes]:
    return sorted(row.numpy().tobytes() for row in inputs)


def test_digits_are_scikit_learns_and_every_class_is_in_proportion() -> None:
    data = load_data("digits")
    images, labels = load_digits(return_X_y=True)
    both = torch.cat([data.train.inputs, data.test.inputs])
    expected = torch.from_numpy((images / 16).astype(np.float32)).view(-1, 1, 8, 8)
    assert rows(both) == rows(expected)
    part = np.bincount(data.test.targets) / np.bincount(labels)
    assert np.abs(part - 450 / 1797).max() < 0.01
    assert both.max() == 1
    assert torch.equal(data.train.inputs, load_data("digits", seed=9).train.inputs)


def test_moons_are_fixed_and_balanced() -> None:
    data = load_data("moons")
    assert torch.equal(data.train.inputs, load_data("moons").train.inputs)
    assert (data.shape, data.num_classes, len(data.train), len(data.test)) == ((2,), 2, 500, 500)
    assert torch.bincount(torch.cat([data.train.targets, data.test.targets])).tolist() == [500, 500]
    normal = torch.cat([x for x, _ in make_loader(data, data.train, 64)])
    torch.testing.assert_close(normal.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(2))


@pytest.mark.parametrize(("validation", "count"), [(0, 0), (0.0, 0), (100, 100), (0.1, 135)])
def test_validation_is_disjoint_and_nothing_is_lost(validation: float, count: int) -> None:
    whole, data = load_data("digits"), load_data("digits", validation=validation, seed=4)
    if count == 0:
        assert data.validation is None
        return
    assert len(data.validation) == count
    assert data.train_size == 1347 - count
    numbered = Split(torch.arange(1347), torch.arange(1347))
    parts = hold_out(replace(whole, classes=(), train=numbered), validation, 4)
    kept, held = set(parts.train.targets.tolist()), set(parts.validation.targets.tolist())
    assert not kept & held
    assert kept | held == set(range(1347))
    order = torch.randperm(1347, generator=torch.Generator().manual_seed(4))
    assert held == set(order[-count:].tolist())
    assert rows(torch.cat([data.train.inputs, data.validation.inputs])) == rows(whole.train.inputs)


@pytest.mark.parametrize("validation", [-1, 1347, 1.0, -0.1, True])
def test_impossible_validation_splits(validation: float) -> None:
    with pytest.raises(ValueError, match="validation is"):
        load_data("digits", validation=validation)


@pytest.mark.parametrize(
    ("name", "nearest"), [("minst", "mnist"), ("cifar-10", "cifar10"), ("Digits", "digits")]
)
def test_unknown_names_get_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no data set '{name}': did you mean '{nearest}'"):
        load_data(name)


def test_a_hopeless_name_gets_the_list_and_a_missing_path_says_so() -> None:
    with pytest.raises(ValueError, match="the names are digits, moons"):
        load_data("qqqqqq")
    with pytest.raises(DataError, match="does not exist"):
        load_data("some/where")


def test_the_registry_is_consistent(tmp_path: Path) -> None:
    for name, entry in DATASETS.items():
        assert entry.name == name
        assert entry.summary
        assert entry.homepage.startswith("http")
        assert entry.ood is None or DATASETS[entry.ood].ood == name
        if entry.source is not None:
            assert entry.source.name == name
            assert all(len(file.sha256) == 64 for file in entry.source.remote)
    assert DATASETS["digits"].available()


def test_labels_out_of_range_and_lengths_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match="2 inputs but 3 targets"):
        Split(torch.zeros(2), torch.zeros(3))
    good = Split(torch.zeros(2, 1), torch.tensor([0, 1]))
    for label in (-1, 2):
        bad = Split(torch.zeros(2, 1), torch.tensor([0, label]))
        with pytest.raises(DataError, match=f"has the label {label}, but its 2 classes"):
            DataSet("x", good, bad, None, ("a", "b"), (1,), (0.0,), (1.0,))
    regression = Split(torch.zeros(2, 1), torch.tensor([-3.5, 99.0]))
    assert DataSet("x", regression, regression, None, (), (1,), (0.0,), (1.0,)).num_classes == 0


def test_loaders_normalise_and_augment_only_when_asked(
    tmp_path: Path, cifar_files: dict[str, bytes], put: Callable, cache: Path
) -> None:
    put(tmp_path / "cifar-10-batches-bin", cifar_files)
    data = load_data("cifar10", data_dir=tmp_path)
    plain = make_loader(data, data.train, 20)
    assert isinstance(plain, BatchLoader)
    ((inputs, _),) = plain
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (data.mean, data.std))
    torch.testing.assert_close(inputs, (data.train.inputs / 255 - mean) / std)
    ((augmented, _),) = make_loader(data, data.train, 20, augment=True)
    assert not torch.equal(augmented, inputs)
    digits = load_data("digits")
    ((left, _),) = make_loader(digits, digits.test, 450, augment=True)
    ((right, _),) = make_loader(digits, digits.test, 450)
    assert torch.equal(left, right)


def test_the_partner_is_taken_when_it_is_here(
    tmp_path: Path, mnist_files: dict[str, bytes], put: Callable, cache: Path
) -> None:
    put(tmp_path / "mnist", mnist_files)
    data = load_data("mnist", data_dir=tmp_path)
    assert ood_for(data, tmp_path).name == "patch-shuffled"
    other = {name: content for name, content in mnist_files.items()}
    put(tmp_path / "fashion-mnist", other)
    found = ood_for(data, tmp_path)
    assert found.name == "fashion-mnist"
    assert torch.equal(found.inputs, load_data("fashion-mnist", data_dir=tmp_path).test.inputs)
    (tmp_path / "fashion-mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(b"half")
    with pytest.raises(DataError, match="damaged or half-downloaded"):
        ood_for(data, tmp_path)


@pytest.mark.parametrize("size", [8, 28, 32, 9, 11, 2])
def test_patch_shuffling_keeps_each_images_pixels_but_no_image(size: int) -> None:
    count = size * size
    images = torch.arange(count, dtype=torch.int32).view(1, 1, size, size).repeat(50, 2, 1, 1)
    shuffled = shuffle_patches(images, torch.Generator().manual_seed(0))
    assert shuffled.shape == images.shape
    expected = torch.arange(count, dtype=torch.int32).expand(50, 2, count)
    assert torch.equal(shuffled.flatten(2).sort(2).values, expected)
    assert (shuffled != images).flatten(1).any(1).all()
    assert torch.equal(shuffled[:, 0], shuffled[:, 1])
    if size % 4 == 0:
        tile = size // 4
        corner = shuffled[0, 0, :tile, :tile]
        assert torch.equal(corner - corner[0, 0], images[0, 0, :tile, :tile])


def test_stand_ins_are_fixed_and_of_the_right_form() -> None:
    digits, moons = load_data("digits"), load_data("moons")
    found = ood_for(digits)
    assert torch.equal(found.inputs, ood_for(digits).inputs)
    assert found.inputs.dtype == digits.test.inputs.dtype
    torch.testing.assert_close(found.inputs.flatten(1).sum(1), digits.test.inputs.flatten(1).sum(1))
    assert "stand-in" in found.note
    far = ood_for(moons)
    assert far.name == "far points"
    away = (far.inputs - moons.test.inputs.mean(0)) / moons.test.inputs.std(0)
    assert away.norm(dim=1).min() > 3.99
    assert away.norm(dim=1).max() < 6.01


def test_a_streamed_folder_has_a_stand_in_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / name / f"{i}.png")
    data = load_data(f"folder:{tmp_path}", stream=True)
    assert ood_for(data).inputs.shape == (2, 3, 8, 8)


def test_noise_is_fixed_and_every_pixel_is_its_own() -> None:
    digits = load_data("digits")
    noise = noise_for(digits)
    assert noise is not None
    assert torch.equal(noise.inputs, noise_for(digits).inputs)  # type: ignore[union-attr]
    pixels = noise.inputs.double().flatten(1)
    assert pixels.shape == (2000, 64)
    # A uniform whole number from 0 to 255 has mean 127.5 and standard deviation 73.9; 128,000 pixels.
    assert abs(float(pixels.mean()) - 127.5) < 4 * 73.9 / 128_000**0.5
    assert float(pixels.std()) == pytest.approx((256**2 - 1) ** 0.5 / 12**0.5, rel=0.01)
    neighbours = torch.corrcoef(torch.stack([pixels[:, :-1].flatten(), pixels[:, 1:].flatten()]))
    assert abs(float(neighbours[0, 1])) < 4 / 126_000**0.5
    assert noise_for(load_data("moons")) is None
