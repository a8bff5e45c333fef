"""Predictions shared by the tests of metrics."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Predictions = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def predictions() -> Predictions:
    """Random probabilities (n, classes) and labels drawn from them, hence calibrated."""

    def make(
        n: int = 500, classes: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
        probs = logits.softmax(dim=1)
        targets = torch.multinomial(probs, 1, generator=generator)[:, 0]
        return probs.to(dtype), targets

    return make
