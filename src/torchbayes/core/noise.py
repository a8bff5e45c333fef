"""Random numbers for large tensors: exact, seedable, and drawn on all cores.

torch's normal generator runs on one thread, and for a network with wide layers it takes as long as the
forward and backward pass. Here `torchbayes.kernels` fills large float32 tensors on a CPU: on all threads,
and more than twice as fast on each. The numbers depend only on the generator's state, not on the number of
threads or their timing: saving that state is enough to reproduce them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchbayes import kernels

__all__ = ["gaussians_", "normal_", "normals_", "random_signs"]


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
