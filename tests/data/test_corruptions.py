"""Corruptions against NumPy, SciPy and Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from torchbayes.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt


def photographs(
    count: int = 6, channels: int = 3, height: int = 24, width: int = 32
) -> torch.Tensor:
    """Smooth pictures with detail of all sizes, in [0.05, 0.95]."""
    rng = np.random.default_rng(0)
    images = sum(
        ndimage.gaussian_filter(rng.normal(size=(count, channels, height, width)), (0, 0, s, s)) * s
        for s in (1, 2, 4)
    )
    low, high = images.min(), images.max()
    return torch.from_numpy(0.05 + 0.9 * (images - low) / (high - low)).float()


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 3, 32, 32), (2, 2, 9, 14), (1, 1, 1, 1)])
def test_shape_type_and_range_are_kept(kind: str, shape: tuple[int, ...]) -> None:
    unit = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    for images in (unit, unit.double(), (255 * unit).to(torch.uint8)):
        kept = images.clone()
        for severity in SEVERITIES:
            made = corrupt(images, kind, severity)
            assert made.shape == images.shape
            assert made.dtype == images.dtype
            assert float(made.min()) >= 0
            assert float(made.max()) <= (255 if images.dtype == torch.uint8 else 1)
            assert torch.equal(made, corrupt(images, kind, severity))
        assert torch.equal(images, kept)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_each_severity_does_more_damage(kind: str) -> None:
    images = photographs()
    damage = [float((corrupt(images, kind, s) - images).abs().mean()) for s in SEVERITIES]
    assert damage[0] > 0
    assert damage == sorted(damage)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_bytes_and_floats_agree(kind: str) -> None:
    whole = (255 * photographs(2)).round().to(torch.uint8)
    made = corrupt(whole, kind, 3)
    assert (made.float() / 255 - corrupt(whole.float() / 255, kind, 3)).abs().max() <= 0.5001 / 255


def test_noise_has_its_standard_deviation() -> None:
    made = corrupt(torch.full((40, 1, 25, 25), 0.5), "noise", 1) - 0.5
    # 25,000 draws: the estimated std is within 4 standard errors, std / sqrt(2 n).
    assert float(made.std()) == pytest.approx(0.08, abs=4 * 0.08 / (2 * 25_000) ** 0.5)
    assert abs(float(made.mean())) < 4 * 0.08 / 25_000**0.5


def test_blur_is_scipy_s() -> None:
    images = photographs(2)
    made = corrupt(images, "blur", 2).numpy()
    std = (0, 0, 0.055 * 24, 0.055 * 32)
    expected = ndimage.gaussian_filter(images.numpy(), std, mode="nearest", truncate=5.0)
    assert np.abs(made - expected).max() < 3e-3  # ours is cut at 3 standard deviations


def test_contrast_by_hand() -> None:
    images = photographs(2)
    mean = images.mean((2, 3), keepdim=True)
    assert torch.allclose(corrupt(images, "contrast", 3), mean + 0.3 * (images - mean), atol=1e-6)


def test_pixelate_by_hand() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4) / 16
    made = corrupt(image, "pixelate", 3)  # two blocks a side
    blocks = image.view(2, 2, 2, 2).mean((1, 3))
    assert torch.allclose(made[0, 0], blocks.repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_jpeg_is_pillow_s() -> None:
    picture = (255 * photographs(1)[0]).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=25)
    expected = np.asarray(Image.open(file)).transpose(2, 0, 1)
    assert np.array_equal(corrupt(picture[None], "jpeg", 2)[0].numpy(), expected)


@pytest.mark.parametrize("size", [(24, 24), (20, 32)])
def test_rotation_is_scipy_s(size: tuple[int, int]) -> None:
    images = photographs(8, 1, *size)
    made = corrupt(images, "rotation", 3).numpy()[:, 0]
    turned = 0
    for picture, result in zip(images.numpy()[:, 0], made, strict=True):
        errors = [
            np.abs(ndimage.rotate(picture, angle, reshape=False, order=1) - result)[6:-6, 6:-6]
            for angle in (30, -30)
        ]
        assert min(error.max() for error in errors) < 1e-4
        turned += int(np.argmin([error.max() for error in errors]))
    assert 0 < turned < 8  # both ways


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 1, 4, 4), "fog", 1), "unknown corruption 'fog'"),
        ((torch.zeros(1, 1, 4, 4), "noise", 0), "severity is 0"),
        ((torch.zeros(1, 4, 4), "noise", 1), "cannot corrupt"),
        ((torch.zeros(1, 1, 4, 4, dtype=torch.int64), "noise", 1), "cannot corrupt"),
    ],
)
def test_bad_input(arguments: tuple[torch.Tensor, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(*arguments)


def test_no_images() -> None:
    assert corrupt(torch.zeros(0, 1, 4, 4), "jpeg", 1).shape == (0, 1, 4, 4)
