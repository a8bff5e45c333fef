"""Weights as a few flat tensors: large ones by themselves, the small ones of a type packed together.

Many small tensors cost a call each for every operation; packed into one they cost a single call. Packing
large weights would cost more in copying than it saves in calls, so each of them is a slab of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchbayes.core.workspace import LARGE, Workspace

__all__ = ["Slab", "slabs_of"]

# In elements. Matrix products may round differently on memory that is less aligned than torch's own.
_ALIGNMENT = 64


class Slab:
    """Some of a network's weights, treated as one flat tensor.

    Call the methods that take tensors without gradients.

    Args:
        indices: Indices of the slab's weights in the list of all weights.
        names: Names of all weights.
        weights: All weights.
    """

    def __init__(self, indices: list[int], names: list[str], weights: Sequence[Tensor]) -> None:
        self.indices, self.names = indices, [names[i] for i in indices]
        self.members = [weights[i] for i in indices]
        self._sizes = [weight.numel() for weight in self.members]
        self.count = sum(self._sizes)
        self.dtype, self.device = self.members[0].dtype, self.members[0].device
        # A large weight in torch's usual order needs no packing: its memory is flat already.
        self._plain = len(indices) == 1 and self.members[0].is_contiguous()
        self._shapes = [weight.shape for weight in self.members]
        self._strides = [weight.stride() for weight in self.members]
        self._spans = [-(-_extent(w) // _ALIGNMENT) * _ALIGNMENT for w in self.members]

    def take(self, space: Workspace) -> Tensor:
        """Take a buffer for one number per weight."""
        return space.take(self.count, self.dtype, self.device)

    def flat(self, space: Workspace, tensors: Sequence[Tensor]) -> Tensor:
        """Join one tensor per weight of the slab into one flat tensor."""
        if self._plain:
            return tensors[0].reshape(-1)
        return torch.cat([tensor.reshape(-1) for tensor in tensors], out=self.take(space))

    def flat_gradient(self, space: Workspace, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Like `flat`, where a missing gradient counts as 0; None if all are missing."""
        if all(gradient is None for gradient in gradients):
            return None
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        filled = [
            nothing.expand(shape) if gradient is None else gradient
            for gradient, shape in zip(gradients, self._shapes, strict=True)
        ]
        return self.flat(space, filled)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor into views of the weights' shapes."""
        pieces = flat.split(self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def weights(self, space: Workspace, flat: Tensor) -> list[Tensor]:
        """Like `shaped`, but aligned and laid out in memory like the weights themselves."""
        if self._plain:
            return self.shaped(flat)
        pieces = space.take(sum(self._spans), self.dtype, self.device).split(self._spans)
        result = [
            piece.as_strided(shape, stride, piece.storage_offset())
            for piece, shape, stride in zip(pieces, self._shapes, self._strides, strict=True)
        ]
        torch._foreach_copy_(result, self.shaped(flat))
        return result


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, gaps included."""
    steps = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(steps) if tensor.numel() else 0


def slabs_of(names: list[str], weights: Sequence[Tensor]) -> list[Slab]:
    """Sort weights into slabs."""
    large: list[list[int]] = []
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, weight in enumerate(weights):
        if weight.numel() >= LARGE:
            large.append([index])
        else:
            small.setdefault((weight.dtype, weight.device), []).append(index)
    return [Slab(indices, names, weights) for indices in [*large, *small.values()]]
