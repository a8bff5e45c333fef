"""Random numbers for large tensors: exact, seedable, and drawn on all cores.

torch's normal generator runs on one thread, and for a network with wide layers it takes as long as the
forward and backward pass. Here `torchbayes.kernels` fills large float32 tensors on a CPU: on all threads,
and more than twice as fast on each. The numbers depend only on the generator's state, not on the number of
threads or their timing: saving that state is enough to reproduce them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchbayes import kernels

__all__ = ["gaussians_", "normal_", "normals_", "random_signs", "slices_of_normals_"]

# Entries of a whole tensor that are drawn at a time where only a slice of it is kept. A multiple of 16:
# torch's generator for the CPU draws that many together.
_PIECE = 1 << 20


def normal_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill `tensor` with standard normal numbers and return it.

    Args:
        tensor: The tensor to fill, in place.
        generator: Source of the numbers; torch's global generator if None.

    Example:
        >>> import torch
        >>> from torchbayes.core.noise import normal_
        >>> a = normal_(torch.empty(3), torch.Generator().manual_seed(0))
        >>> b = normal_(torch.empty(3), torch.Generator().manual_seed(0))
        >>> bool((a == b).all())
        True
    """
    normals_([tensor], generator)
    return tensor


def normals_(tensors: Sequence[Tensor], generator: torch.Generator | None = None) -> None:
    """Fill all `tensors` with standard normal numbers, sharing the work over torch's threads.

    Args:
        tensors: The tensors to fill, in place.
        generator: Source of the numbers; torch's global generator if None.
    """
    if kernels.run(normals_, [tensors], [], generator) is not None:
        return
    for tensor in tensors:
        if generator is not None and generator.device.type != tensor.device.type:
            source = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
            tensor.detach().copy_(normal_(source, generator))
        else:
            tensor.detach().normal_(generator=generator)


def slices_of_normals_(
    tensors: Sequence[Tensor], spans: Sequence[tuple[int, int]],
    generator: torch.Generator | None = None, *, together: bool = False,
) -> None:  # fmt: skip
    """Fill flat slices of larger tensors with the numbers that `normals_` gives the larger tensors there.

    All processes that share out a tensor draw the same numbers, and each keeps its own.

    Args:
        tensors: The slices to fill, in place.
        spans: Where each begins in its larger tensor, and how many entries that has.
        generator: Source of the numbers; torch's global generator if None.
        together: Whether the larger tensors are parts of one, which is filled as a whole. On an accelerator,
            whose numbers depend on how many are drawn, they are filled one by one all the same.
    """
    if kernels.run(normals_, [tensors], [], generator, spans) is not None or not tensors:
        return
    device = tensors[0].device
    if generator is not None and generator.device.type != device.type:
        drawn = [torch.empty(t.shape, dtype=t.dtype, device=generator.device) for t in tensors]
        slices_of_normals_(drawn, spans, generator, together=together)
        for tensor, own in zip(tensors, drawn, strict=True):
            tensor.copy_(own)
        return
    runs = [[i] for i in range(len(tensors))]
    if together and device.type == "cpu":
        runs = [list(range(len(tensors)))]
    for run in runs:
        total = sum(spans[i][1] for i in run)
        # The last piece is drawn in another way if it is short, so that it is joined to the one before it.
        cuts = (
            [*range(0, max(total - 15, 1), _PIECE), total] if device.type == "cpu" else [0, total]
        )
        begins = accumulate((spans[i][1] for i in run), initial=0)
        places = [
            (begin + spans[i][0], tensors[i].view(-1))
            for begin, i in zip(begins, run, strict=False)
        ]
        for first, last in pairwise(cuts):
            piece = torch.empty(last - first, dtype=tensors[0].dtype, device=device)
            piece.normal_(generator=generator)
            for begin, own in places:
                low, high = max(begin, first), min(begin + own.numel(), last)
                if low < high:
                    own[low - begin : high - begin] = piece[low - first : high - first]


def gaussians_(
    tensors: Sequence[Tensor],
    means: Sequence[Tensor],
    stds: Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> None:
    """Fill all `tensors` with mean + std · ε, where ε are the numbers of `normals_`.

    Args:
        tensors: The tensors to fill, in place.
        means: The mean of every entry of every tensor.
        stds: The standard deviation of every entry of every tensor.
        generator: Source of the numbers; torch's global generator if None.

    Example:
        >>> import torch
        >>> from torchbayes.core.noise import gaussians_
        >>> x = torch.empty(3)
        >>> gaussians_([x], [torch.ones(3)], [torch.zeros(3)])
        >>> x
        tensor([1., 1., 1.])
    """
    if kernels.run(gaussians_, [tensors], [means, stds], generator) is not None:
        return
    normals_(tensors, generator)
    for tensor, mean, std in zip(tensors, means, stds, strict=True):
        tensor.detach().mul_(std).add_(mean)


def random_signs(
    shape: Sequence[int], generator: torch.Generator | None = None, *,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Draw independent fair signs, +1 or −1.

    Args:
        shape: Shape of the result.
        generator: Source of the signs; torch's global generator if None.
        dtype: Type of the result.
        device: Device of the result.

    Example:
        >>> import torch
        >>> from torchbayes.core.noise import random_signs
        >>> random_signs((2, 3), torch.Generator().manual_seed(0)).abs().sum().item()
        6.0
    """
    source = device if generator is None else generator.device
    count = torch.Size(shape).numel()
    # One 64-bit number serves eight signs: the lowest bit of each of its bytes.
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=source)
    bits = words.random_(generator=generator).view(torch.uint8)[:count].bitwise_and_(1)
    return bits.to(device=device, dtype=dtype).mul_(2).sub_(1).view(shape)
