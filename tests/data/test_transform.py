from __future__ import annotations

import numpy as np
import pytest
import torch

from torchbayes.data import Chain, Normalise, PadCropFlip


def images(count: int = 6, size: tuple[int, int] = (9, 7), dtype: torch.dtype = torch.uint8):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 256, (count, 3, *size), generator=generator)
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalise_agrees_with_numpy(dtype: torch.dtype) -> None:
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    batch = images(dtype=dtype)
    plain = batch.numpy().astype(np.float64) / (255 if dtype == torch.uint8 else 1)
    expected = (plain - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    result = Normalise(mean, std)(batch)
    assert result.dtype == (torch.float32 if dtype == torch.uint8 else dtype)
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-5, atol=2e-6)


def test_normalise_leaves_the_batch_alone_and_takes_features() -> None:
    features = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    result = Normalise((2.0, 20.0), (1.0, 10.0))(features)
    assert result.tolist() == [[-1, -1], [1, 1]]
    assert features.tolist() == [[1, 10], [3, 30]]


def test_normalise_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="1 means and 2"):
        Normalise((0.1,), (0.1, 0.2))
    with pytest.raises(ValueError, match="above 0"):
        Normalise((0.1,), (0.0,))
    with pytest.raises(TypeError, match="int64"):
        Normalise((0.1,), (0.1,))(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 channels"):
        Normalise((0.1,), (0.1,))(torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("transform", [PadCropFlip(), PadCropFlip(3, flip=False),
                                       PadCropFlip(0), PadCropFlip(2, crop=5),
                                       PadCropFlip(0, crop=6)])  # fmt: skip
def test_augmentation_equals_a_loop_over_images(transform: PadCropFlip, dtype: torch.dtype) -> None:
    batch = images(count=64, dtype=dtype)
    result = transform(batch, torch.Generator().manual_seed(5))
    tops, lefts, mirrors = transform.draw(64, (9, 7), torch.Generator().manual_seed(5))
    height, width = (9, 7) if transform.crop is None else (transform.crop, transform.crop)
    for i, (top, left, mirror) in enumerate(zip(tops, lefts, mirrors, strict=True)):
        pad = transform.pad
        image = batch[i].numpy()
        padded = np.pad(image[:, :, ::-1] if mirror else image, ((0, 0), (pad, pad), (pad, pad)))
        expected = padded[:, top : top + height, left : left + width]
        np.testing.assert_array_equal(result[i].numpy(), expected)


def test_every_offset_and_both_mirrors_come_up_about_equally() -> None:
    count = 9 * 9 * 200
    tops, lefts, mirrors = PadCropFlip(4).draw(count, (32, 32), torch.Generator().manual_seed(0))
    cells = torch.bincount(tops * 9 + lefts, minlength=81).double()
    # Pearson's statistic has mean 80 and standard deviation sqrt(160) under uniformity.
    assert abs(((cells - 200) ** 2 / 200).sum() - 80) < 4 * 160**0.5
    assert abs(mirrors.double().mean() - 0.5) < 4 * 0.5 / count**0.5


def test_flip_off_never_mirrors_and_an_empty_batch_passes() -> None:
    _, _, mirrors = PadCropFlip(flip=False).draw(100, (8, 8), torch.Generator())
    assert not mirrors.any()
    assert PadCropFlip()(images(0), torch.Generator()).shape == (0, 3, 9, 7)


def test_augmentation_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="pad=-1"):
        PadCropFlip(-1)
    with pytest.raises(ValueError, match="crop=0"):
        PadCropFlip(crop=0)
    with pytest.raises(ValueError, match="cannot cut 20"):
        PadCropFlip(4, crop=20)(images(), torch.Generator())
    with pytest.raises(ValueError, match="leave the augmentation off"):
        PadCropFlip()(torch.zeros(3, 2), torch.Generator())


def test_a_chain_applies_in_order_with_one_generator() -> None:
    crop, normalise = PadCropFlip(2), Normalise((0.5,) * 3, (0.5,) * 3)
    generator = torch.Generator().manual_seed(3)
    expected = normalise(crop(images(), generator))
    chained = Chain(crop, normalise)
    assert torch.equal(chained(images(), torch.Generator().manual_seed(3)), expected)
    assert "PadCropFlip(pad=2" in repr(chained)
