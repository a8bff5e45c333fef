"""The weights of the KL term: over an epoch the minibatches' losses add up to the free energy."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchbayes as tb
from torchbayes.variational import (
    MeanField,
    annealed_weight,
    blundell_weight,
    uniform_weight,
)


@pytest.mark.parametrize("steps", [1, 2, 7, 60, 469, 5000])
@pytest.mark.parametrize("scheme", [uniform_weight, blundell_weight])
def test_mean_over_an_epoch_is_one(scheme, steps: int) -> None:
    assert math.fsum(scheme(i, steps) for i in range(steps)) / steps == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 50, 469, 2000])
def test_blundells_weights_are_exact(steps: int) -> None:
    for i in {1, min(2, steps), steps // 2 + 1, steps}:
        exact = steps * Fraction(2 ** (steps - i), 2**steps - 1)
        got = blundell_weight(i - 1, steps)
        if exact > Fraction(1, 10**300):
            assert got == pytest.approx(float(exact), rel=1e-12)
        else:
            assert 0 <= got < 1e-299  # hardly a double any more, and no error


@pytest.mark.parametrize("scheme", [uniform_weight, blundell_weight])
def test_an_epochs_losses_are_the_free_energy(scheme) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3).double(), torch.randint(2, (60,))
    net = MeanField(nn.Linear(3, 2).double(), tb.GaussianPrior(precision=2.0), init_std=0.1)
    steps = 5
    with net.mean_mode(), torch.no_grad():
        free_energy = net.kl() + F.cross_entropy(net(x), y, reduction="sum")
        total = sum(
            (F.cross_entropy(net(a), b) + scheme(i, steps) * net.kl() / 60) * 60 / steps
            for i, (a, b) in enumerate(zip(x.split(12), y.split(12), strict=True))
        )
    torch.testing.assert_close(total, free_energy)


def test_annealing() -> None:
    weights = [annealed_weight(i, 10) for i in range(15)]
    assert weights == [*[(i + 1) / 10 for i in range(10)], *[1.0] * 5]
    assert annealed_weight(0, 1) == 1


@pytest.mark.parametrize("scheme", [uniform_weight, blundell_weight, annealed_weight])
def test_bad_steps(scheme) -> None:
    with pytest.raises(ValueError, match="steps is 0: expected a whole number of at least 1"):
        scheme(0, 0)
    with pytest.raises(ValueError, match="step is -1"):
        scheme(-1, 3)


def test_step_outside_the_epoch() -> None:
    with pytest.raises(ValueError, match="step is 3: expected one of the 3 minibatches"):
        blundell_weight(3, 3)
