"""The data sets that come with scikit-learn and need no download."""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits as sklearn_digits
from sklearn.datasets import make_moons
from sklearn.model_selection import train_test_split

from torchbayes.data.dataset import DataSet, Split

__all__ = ["load_digits", "load_moons"]


def load_digits(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load 1,797 handwritten digits of 8 × 8 pixels in 17 grey levels (Alpaydin and Kaynak 1998).

    They are a quarter of the original set; the split into 1,347 and 450 is fixed and has every
    class in proportion. The arguments are there for the registry and not used.
    """
    images, labels = sklearn_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    inputs = [torch.from_numpy(part / 16).float().view(-1, 1, 8, 8) for part in parts[:2]]
    targets = [torch.from_numpy(part).long() for part in parts[2:]]
    train, test = (Split(x, y) for x, y in zip(inputs, targets, strict=True))
    return DataSet(
        name="digits",
        train=train,
        test=test,
        validation=None,
        classes=tuple("0123456789"),
        shape=(1, 8, 8),
        mean=(float(train.inputs.mean()),),
        std=(float(train.inputs.std()),),
        note="scikit-learn's load_digits, grey levels divided by 16",
    )


def load_moons(data_dir: str | Path | None, download: bool) -> DataSet:
    """Make 1,000 points in two interleaved half circles, half of them for testing.

    The arguments are there for the registry and not used.
    """
    points, labels = make_moons(1000, noise=0.15, random_state=0)
    inputs, targets = torch.from_numpy(points).float(), torch.from_numpy(labels).long()
    train = Split(inputs[:500], targets[:500])
    return DataSet(
        name="moons",
        train=train,
        test=Split(inputs[500:], targets[500:]),
        validation=None,
        classes=("upper", "lower"),
        shape=(2,),
        mean=tuple(train.inputs.mean(0).tolist()),
        std=tuple(train.inputs.std(0).tolist()),
        note="scikit-learn's make_moons with noise 0.15",
    )
