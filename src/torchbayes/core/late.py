"""The numbers of an update, read from the device when the next update has been sent there.

A number that is read at once makes Python wait until the device has computed everything before it, and the
device wait for Python afterwards. A copy that is only asked for arrives while the next update is prepared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchbayes.core.device import PINNED

__all__ = ["Late", "LateError"]


class LateError(FloatingPointError):
    """A number that an accelerator has shown one step late was not finite: the step before was taken."""


class Late:
    """Numbers on their way from a device.

    Example:
        >>> late = Late()
        >>> late.exchange({"loss": torch.tensor(2.0)}, "the first")
        >>> late.exchange({"loss": torch.tensor(1.0)}, "the second")
        ({'loss': 2.0}, 'the first')
        >>> late.rest()
        ({'loss': 1.0}, 'the second')
    """

    def __init__(self) -> None:
        self._sent: tuple[dict[str, Any], Tensor, torch.Event | None, Any] | None = None

    @property
    def waiting(self) -> bool:
        """Whether there are numbers that have not been returned."""
        return self._sent is not None

    def exchange(
        self, numbers: dict[str, Tensor | float], about: Any
    ) -> tuple[dict[str, float], Any] | None:
        """Ask for numbers, and return those that were asked for before.

        Args:
            numbers: The numbers by name, tensors of one device or plain.
            about: Returned with them.
        """
        before = self.rest()  # before anything is sent on: the device has computed these long ago
        values = [v.detach().reshape(()) for v in numbers.values() if isinstance(v, Tensor)]
        wide = any(value.dtype is torch.float64 for value in values)
        joined = torch.stack([v.to(torch.float64 if wide else torch.float32) for v in values])
        there, arrived = torch.empty(joined.shape, dtype=joined.dtype), None
        if joined.device.type in PINNED:
            there, arrived = there.pin_memory(), torch.Event(joined.device)
            there.copy_(joined, non_blocking=True)
            # Without a stream it would be that of the current device, which may be another one.
            arrived.record(torch.accelerator.current_stream(joined.device))
        else:
            there.copy_(joined)
        self._sent = dict(numbers), there, arrived, about
        return before

    def rest(self) -> tuple[dict[str, float], Any] | None:
        """Return what was asked for last, if it has not been returned yet."""
        if self._sent is None:
            return None
        (numbers, there, arrived, about), self._sent = self._sent, None
        if arrived is not None:
            arrived.synchronize()
        values = iter(there.tolist())
        read = {n: next(values) if isinstance(v, Tensor) else v for n, v in numbers.items()}
        return read, about
