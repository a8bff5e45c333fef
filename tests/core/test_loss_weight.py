"""The weight of a loss, as its graph shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.core.batch import LossWeights, loss_weight

N = 8
TARGETS = torch.arange(N) % 3


def logits() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(N, 3, requires_grad=True)


def entropy(**options: object) -> Tensor:
    return F.cross_entropy(logits(), TARGETS, **options)  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[], Tensor], float | None]] = {
    "mean": (lambda: entropy(), 1.0),
    "divided": (lambda: entropy() / 4, 0.25),
    "multiplied": (lambda: 0.25 * entropy(), 0.25),
    "by a tensor": (lambda: torch.tensor(0.25) * entropy(), 0.25),
    "twice": (lambda: entropy() / 4 / 4, 1 / 16),
    "a share": (lambda: entropy() * (2 / N), 0.25),
    "scaled for float16": (lambda: (entropy() / 4) * torch.tensor(65536.0), 0.25),
    "in bfloat16": (lambda: (entropy() / 4).bfloat16(), 0.25),
    "a mean of single losses": (lambda: (entropy(reduction="none") / 4).mean(), 0.25),
    "a mean of one number": (lambda: (entropy() / 4).mean(), 0.25),
    "with a penalty": (lambda: (entropy() + 0.01 * logits().square().mean()) / 2, 0.5),
    "smoothed labels": (lambda: entropy(label_smoothing=0.1) / 2, 0.45),
    "a sum over all pieces' labels": (lambda: entropy(reduction="sum") / (4 * N), 0.25),
    "a sum that was not divided enough": (lambda: entropy(reduction="sum") / 4, 2.0),
    "binary": (lambda: F.binary_cross_entropy_with_logits(logits(), torch.ones(N, 3)) / 4, 0.25),
    "squared error": (lambda: 0.5 * F.mse_loss(logits(), torch.ones(N, 3)), 0.5),
    "weights of examples": (lambda: (torch.rand(N) * entropy(reduction="none")).mean(), None),
    "anything": (lambda: logits().logsumexp(1).norm() / 4, None),
}


@pytest.mark.parametrize("case", CASES)
def test_least_weight(case: str) -> None:
    make, wanted = CASES[case]
    found = loss_weight(make())
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        assert found.least == pytest.approx(wanted)


def test_nominal_weights_compare_pieces() -> None:
    """A factor above 1 may be a scaler's, but pieces that have it in common differ by the others."""
    small, large = loss_weight(entropy() * 2 / N), loss_weight(entropy() * 6 / N)
    assert small is not None
    assert large is not None
    assert large.nominal / small.nominal == pytest.approx(3)


def test_ignored_labels_are_no_items() -> None:
    targets = TARGETS.clone()
    targets[:5] = -100
    loss = F.cross_entropy(logits(), targets, reduction="sum") / 3
    found = loss_weight(loss)
    assert found is not None
    assert found.least == pytest.approx(1.0)


def test_a_loss_whose_graph_was_used_says_nothing() -> None:
    loss = entropy() / 4
    loss.backward()
    assert loss_weight(loss) is None
    assert LossWeights().add(loss, None) is None
