"""The published data sets themselves, where TORCHBAYES_DATA names a folder that has them."""

from __future__ import annotations

import os

import pytest
import torch

from torchbayes.data import DATASETS, DataSet, load_data


def real(name: str) -> DataSet:
    if not os.environ.get("TORCHBAYES_DATA"):
        pytest.skip("TORCHBAYES_DATA names no folder with the real data")
    if not DATASETS[name].available():
        pytest.skip(f"the folder of TORCHBAYES_DATA does not have {name}")
    return load_data(name, download=False)


def moments(data: DataSet) -> tuple[list[float], list[float]]:
    """Exact mean and standard deviation by channel, from the counts of the 256 levels."""
    levels, means, stds = torch.arange(256) / 255, [], []
    for channel in data.train.inputs.unbind(1):
        part = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        means.append(float((part * levels).sum()))
        stds.append(float((part * (levels - means[-1]) ** 2).sum().sqrt()))
    return means, stds


def test_mnist() -> None:
    data = real("mnist")
    assert data.train.inputs.shape == (60_000, 1, 28, 28)
    assert data.test.inputs.shape == (10_000, 1, 28, 28)
    # Published class counts.
    assert torch.bincount(data.train.targets).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert torch.bincount(data.test.targets).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    mean, std = moments(data)
    assert mean == pytest.approx([0.1307], abs=5e-5)
    assert std == pytest.approx([0.3081], abs=5e-5)


def test_fashion_mnist() -> None:
    data = real("fashion-mnist")
    assert data.train.inputs.shape == (60_000, 1, 28, 28)
    assert torch.bincount(data.train.targets).tolist() == [6000] * 10
    assert torch.bincount(data.test.targets).tolist() == [1000] * 10
    mean, std = moments(data)
    assert mean == pytest.approx([0.2860], abs=5e-5)
    assert std == pytest.approx([0.3530], abs=5e-5)
    # Trousers are bright in the middle columns; a wrong reading order would lose that.
    trousers = data.train.inputs[data.train.targets == 1].double().mean((0, 1))
    assert trousers[:, 10:18].mean() > 3 * trousers[:, :6].mean()


def test_cifar10() -> None:
    data = real("cifar10")
    assert data.train.inputs.shape == (50_000, 3, 32, 32)
    assert torch.bincount(data.train.targets).tolist() == [5000] * 10
    assert torch.bincount(data.test.targets).tolist() == [1000] * 10
    mean, std = moments(data)
    # 0.01 leaves room for copies that went through JPEG.
    assert mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.01)
    assert std == pytest.approx([0.2470, 0.2435, 0.2616], abs=0.01)
    # Ships and airplanes are on blue ground, the channels' order therefore visible.
    ships = data.train.inputs[data.train.targets == 8].double().mean((0, 2, 3))
    assert ships[2] > ships[0]


def test_svhn() -> None:
    data = real("svhn")
    assert (len(data.train), len(data.test)) == (73_257, 26_032)
    # Published class counts, the label 10 counted as the digit 0.
    assert torch.bincount(data.train.targets).tolist() == [
        4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659,
    ]  # fmt: skip
    assert moments(data)[0] == pytest.approx([0.4377, 0.4438, 0.4728], abs=5e-4)
