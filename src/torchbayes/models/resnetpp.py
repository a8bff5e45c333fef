"""ResNet++: residual networks that can be sampled, without batch norm.

SELU in place of batch norm and ReLU, weight norm per output feature, and a simplified Fixup: the
scales in the last layer of every residual branch start at a small constant.

=========  ==========================  =========
symbol     parameter name ends with    equation
=========  ==========================  =========
φ_s        `scale`                   (12)
φ_d        `direction`               (12), (13)
=========  ==========================  =========

A weight is θ = φ_s φ_d / ‖φ_d‖, one scale and one direction for every output feature, in every
convolution and in the last linear layer. Directions start uniform on the unit sphere (where the
paper's prior (13) has its mode) and scales at 1, so a weight has variance 1 / fan_in as SELU requires.

Decisions where the paper is silent: the small constant is 0.1 (with 0 the directions of that layer
would have no gradient); convolutions have a bias, except the projection of a shortcut, whose output
is added to one that has; a projection is used only where the shape changes.

References:
    Heek and Kalchbrenner, "Bayesian inference for large scale image classification", 2019, sec. 4.
    Klambauer et al., "Self-normalizing neural networks", NeurIPS 2017.
    Salimans and Kingma, "Weight normalization", NeurIPS 2016.
    Zhang et al., "Fixup initialization", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._residual import ResidualNetwork


class _WeightNorm(nn.Module):
    """A layer whose weight combines one scale and one direction per output feature.

    torch's own weight norm is not used: its fused kernel has no batching rule for `vmap`, its
    modules cannot be pickled, and its parameters are called `original0` and `original1`.
    """

    def __init__(self, shape: Sequence[int], bias: bool, scale: float) -> None:
        super().__init__()
        features = shape[0]
        direction = torch.randn(*shape)
        norm = direction.flatten(1).norm(dim=1).view(-1, *[1] * (len(shape) - 1))
        self.scale = nn.Parameter(torch.full((features,), scale))
        self.direction = nn.Parameter(direction / norm)
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The weight θ = φ_s φ_d / ‖φ_d‖ of Eq. (12)."""
        norm = torch.linalg.vector_norm(self.direction.flatten(1), dim=1)
        factor = (self.scale / norm).view(-1, *[1] * (self.direction.dim() - 1))
        theta: Tensor = self.direction * factor  # Eq. (12)
        return theta


class WeightNormConv2d(_WeightNorm):
    """A weight-normalised convolution that preserves the image size at stride 1."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int,
        stride: int = 1, bias: bool = True, scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__((out_channels, in_channels, kernel_size, kernel_size), bias, scale)
        self.stride = stride
        self.padding = kernel_size // 2

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `x` with the normalised weight."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class WeightNormLinear(_WeightNorm):
    """A weight-normalised linear layer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__((out_features, in_features), bias=True, scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` by the normalised weight."""
        return F.linear(x, self.weight, self.bias)


def _projection(in_channels: int, out_channels: int, stride: int) -> WeightNormConv2d | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return WeightNormConv2d(in_channels, out_channels, 1, stride, bias=False)


class BasicBlockPP(nn.Module):
    """Two 3×3 convolutions and a shortcut, SELU between them and after the addition."""

    def __init__(self, in_channels: int, width: int, stride: int, branch_scale: float) -> None:
        super().__init__()
        self.conv1 = WeightNormConv2d(in_channels, width, 3, stride)
        self.conv2 = WeightNormConv2d(width, width, 3, scale=branch_scale)
        self.shortcut = _projection(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = self.conv2(F.selu(self.conv1(x)))
        return F.selu(branch + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckPP(nn.Module):
    """The block of the paper's Fig. 1: 1×1, 3×3 and 1×1 convolutions and a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int, branch_scale: float) -> None:
        super().__init__()
        self.conv1 = WeightNormConv2d(in_channels, width, 1)
        self.conv2 = WeightNormConv2d(width, width, 3, stride)
        self.conv3 = WeightNormConv2d(width, 4 * width, 1, scale=branch_scale)
        self.shortcut = _projection(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = self.conv3(F.selu(self.conv2(F.selu(self.conv1(x)))))
        return F.selu(branch + (x if self.shortcut is None else self.shortcut(x)))


class ResNetPP(ResidualNetwork):
    """A stem, stages of residual blocks, average pooling and a linear layer."""

    def __init__(
        self, block: Callable[[int, int, int], BasicBlockPP | BottleneckPP], expansion: int,
        depths: Sequence[int], stem_kernel: int, num_classes: int, in_channels: int, width: int,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, in_channels, width=width)
        small = stem_kernel == 3
        self.conv1 = WeightNormConv2d(in_channels, width, stem_kernel, stride=1 if small else 2)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        channels = self.add_stages(block, width, width * expansion, depths)
        self.fc = WeightNormLinear(channels, num_classes)

    def stem(self, images: Tensor) -> Tensor:
        """Apply the first convolution and the pooling."""
        x: Tensor = self.maxpool(F.selu(self.conv1(images)))
        return x


def _small(
    depth: int, num_classes: int, in_channels: int, width: int, branch_scale: float
) -> ResNetPP:
    """Build a network of three stages of `depth` basic blocks with a 3×3 stem."""
    block = partial(BasicBlockPP, branch_scale=branch_scale)
    return ResNetPP(block, 1, (depth,) * 3, 3, num_classes, in_channels, width)


def resnetpp8(
    num_classes: int = 10, in_channels: int = 3, width: int = 16, branch_scale: float = 0.1
) -> ResNetPP:
    """Build the smallest ResNet++, with one block per stage (not in the paper); see `resnetpp20`."""
    return _small(1, num_classes, in_channels, width, branch_scale)


def resnetpp20(
    num_classes: int = 10, in_channels: int = 3, width: int = 16, branch_scale: float = 0.1
) -> ResNetPP:
    """Build a small ResNet++ with the depth of ResNet-20, for runs on a CPU (not in the paper).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first stage; each later stage has twice as many as the one before.
        branch_scale: Initial scale of the last layer of every residual branch.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> model = resnetpp20(in_channels=1)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> [name for name, _ in model.layer1[0].conv1.named_parameters()]
        ['scale', 'direction', 'bias']
    """
    return _small(3, num_classes, in_channels, width, branch_scale)


def resnetpp56(
    num_classes: int = 10, in_channels: int = 3, width: int = 32, branch_scale: float = 0.1
) -> ResNetPP:
    """Build the ResNet++56 of the paper's CIFAR-10 runs (base width 32).

    Arguments and initialisation are those of `resnetpp20`.

    Example:
        >>> import torch
        >>> resnetpp56(width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _small(9, num_classes, in_channels, width, branch_scale)


def resnetpp50(
    num_classes: int = 10, in_channels: int = 3, width: int = 64, branch_scale: float = 0.1
) -> ResNetPP:
    """Build the ResNet++50 of the paper's ImageNet runs: bottleneck blocks, ImageNet stem.

    Arguments and initialisation are those of `resnetpp20`.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     resnetpp50(num_classes=1000)(torch.zeros(2, 3, 224, 224)).shape
        torch.Size([2, 1000])
    """

    def block(channels: int, out_channels: int, stride: int) -> BottleneckPP:
        return BottleneckPP(channels, out_channels // 4, stride, branch_scale)

    return ResNetPP(block, 4, (3, 4, 6, 3), 7, num_classes, in_channels, width)
