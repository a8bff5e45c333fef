"""Corrections of maps of classes and of binary labels: those of their positions, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchbayes as tb
from torchbayes.posthoc import abstain, conformal_sets, temperature_scaling


def maps(count: int, seed: int) -> tuple[tb.ClassPredictive, Tensor]:
    """Over-confident maps (count, 3, 4, 5) of labels that were drawn from the milder truth."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 3, 4, 5, generator=generator, dtype=torch.float64)
    rows = logits.softmax(1).movedim(1, -1).reshape(-1, 3)
    labels = torch.multinomial(rows, 1, generator=generator).reshape(count, 4, 5)
    return tb.Categorical().predictive(2 * logits[None]), labels


def flat(p: tb.ClassPredictive, labels: Tensor) -> tuple[tb.ClassPredictive, Tensor]:
    probs = p.probs.movedim(1, -1).reshape(-1, 3)
    return tb.ClassPredictive(probs, p.aleatoric.flatten(), p.draws), labels.flatten()


def test_a_map_is_corrected_like_its_positions() -> None:
    p, labels = maps(60, 0)
    rows, row_labels = flat(p, labels)
    scale = temperature_scaling(p, labels)
    assert scale == temperature_scaling(rows, row_labels)
    assert scale.temperature == pytest.approx(2, rel=0.15)
    assert scale(p).probs.shape == p.probs.shape
    torch.testing.assert_close(flat(scale(p), labels)[0].probs, scale(rows).probs)
    sets = conformal_sets(p, labels, 0.9)
    assert sets == conformal_sets(rows, row_labels, 0.9)
    assert sets(p).shape == p.probs.shape
    covered = float(sets(p).gather(1, labels[:, None]).double().mean())
    assert covered == pytest.approx(0.9, abs=0.002)
    rule = abstain(p, labels, 0.2)
    assert rule == abstain(rows, row_labels, 0.2)
    assert rule(p).shape == labels.shape


def test_ignored_positions_have_no_part() -> None:
    p, labels = maps(60, 1)
    hidden = torch.where(torch.arange(5) == 0, 255, labels)  # the first column
    rest = tb.ClassPredictive(p.probs[..., 1:], p.aleatoric[..., 1:], 1)
    for fit in (temperature_scaling, conformal_sets, abstain):
        assert fit(p, hidden, ignore_index=255) == fit(rest, labels[..., 1:])
        with pytest.raises(ValueError, match="ignore_index the label of what is not labelled"):
            fit(p, hidden)
    with pytest.raises(ValueError, match="every target is 255"):
        conformal_sets(p, torch.full_like(labels, 255), ignore_index=255)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_binary_labels_are_two_classes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(900, *shape, generator=generator, dtype=torch.float64)
    labels = (torch.rand(900, *shape, generator=generator) < logits.sigmoid()).double()
    p = tb.Bernoulli().predictive(2 * logits[None])
    two = p.as_classes()
    scale = temperature_scaling(p, labels)
    assert scale == temperature_scaling(two, labels.long())
    scaled = scale(p)
    assert isinstance(scaled, tb.BinaryPredictive)
    expected = (2 * logits / scale.temperature).sigmoid()  # with one draw, logits are divided by T
    torch.testing.assert_close(scaled.probs, expected, rtol=1e-6, atol=1e-9)
    sets = conformal_sets(p, labels, 0.8)(p)
    assert sets.shape == (900, 2, *shape)
    assert float(sets.gather(1, labels.long()[:, None]).double().mean()) >= 0.8
    assert abstain(p, labels, 0.3)(p).shape == labels.shape
