"""The device of these tests: a simulated accelerator, or with `--device cuda` a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchbayes.core import device as device_module
from torchbayes.variational.draw import _steps

from .simulated import KIND, simulated_accelerators


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """An accelerator, of the simulated ones the second: the first is where forgotten tensors go."""
    given = request.config.getoption("--device")
    if given is not None:
        yield torch.empty(0, device=given).device
        return
    device_module.PINNED.add(KIND)
    with simulated_accelerators():
        yield torch.device(KIND, 1)
    _steps.stop()  # other tests see an optimiser's step as it is without an accelerator
