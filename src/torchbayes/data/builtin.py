"""Data sets that need no download: those of scikit-learn, and a noisy curve."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from torchbayes.data.dataset import DataSet, Split

__all__ = ["curve_data", "load_curve", "load_digits", "load_moons", "toy_curve"]


def load_digits(data_dir: str | Path | None, download: bool) -> DataSet:
    """Load 1,797 handwritten digits of 8 × 8 pixels in 17 grey levels (Alpaydin and Kaynak 1998).

    They are a quarter of the original set; the split into 1,347 and 450 is fixed and stratified by
    class. The arguments are those of every loader in the registry and are ignored.
    """
    # Imported here because scikit-learn takes longer to import than torch.
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    images, labels = sklearn_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    train, test = (
        Split(torch.from_numpy(x / 16).float().view(-1, 1, 8, 8), torch.from_numpy(y).long())
        for x, y in zip(parts[:2], parts[2:], strict=True)
    )
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
    """Generate 1,000 points in two interleaved half circles, half of them for testing.

    The arguments are those of every loader in the registry and are ignored.
    """
    from sklearn.datasets import make_moons

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


def toy_curve(x: Tensor) -> Tensor:
    """Return the noise-free regression curve of Bayes by Backprop: x + 0.3 sin 2πx + 0.3 sin 4πx."""
    return x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)


def curve_data(
    count: int = 200, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the toy data of the Bayes by Backprop paper: inputs and targets of shape (count, 1).

    y = x + 0.3 sin 2π(x+ε) + 0.3 sin 4π(x+ε) + ε with x uniform in [0, 0.5]. The paper's ε ~ N(0, 0.02)
    is read as a standard deviation of 0.02: a variance of 0.02 would drown the curve.

    Example:
        >>> x, y = curve_data(5, generator=torch.Generator().manual_seed(0))
        >>> x.shape, bool((x >= 0).all() and (x <= 0.5).all())
        (torch.Size([5, 1]), True)
    """
    x = 0.5 * torch.rand(count, 1, generator=generator)
    noise = 0.02 * torch.randn(count, 1, generator=generator)
    return x, toy_curve(x + noise)


def load_curve(data_dir: str | Path | None, download: bool) -> DataSet:
    """Generate the regression data of Bayes by Backprop: 1,000 training and 1,000 test points.

    The arguments are those of every loader in the registry and are ignored.
    """
    generator = torch.Generator().manual_seed(0)
    train = Split(*curve_data(1000, generator=generator))
    return DataSet(
        name="bbb-curve",
        train=train,
        test=Split(*curve_data(1000, generator=generator)),
        validation=None,
        classes=(),
        shape=(1,),
        mean=(float(train.inputs.mean()),),
        std=(float(train.inputs.std()),),
        truth=toy_curve,
        note="y = x + 0.3 sin 2π(x+ε) + 0.3 sin 4π(x+ε) + ε, x uniform in [0, 0.5], ε of std 0.02",
    )
