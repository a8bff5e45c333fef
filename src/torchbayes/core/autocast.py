"""Computing in the tensors' own types where autocast is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["no_autocast"]


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, for tensors that already have the types to compute in."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
