"""PyramidNet-110 (α = 48) for CIFAR: channels grow a little with every block.

References:
    Han, Kim and Kim, "Deep pyramidal residual networks", CVPR 2017 (additive widening, eq. 3;
    blocks without the first ReLU and with a last batch norm; zero-padded shortcuts).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._residual import ResidualNetwork, kaiming_fan_out_


class PyramidBlock(nn.Module):
    """BN-conv-BN-ReLU-conv-BN and a parameter-free shortcut, nothing after the addition."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = F.relu(self.bn2(self.conv1(self.bn1(x))))
        branch = self.bn3(self.conv2(branch))
        # Rounding up matches the strided convolution on odd sizes.
        shortcut = x if self.stride == 1 else F.avg_pool2d(x, 2, ceil_mode=True)
        result: Tensor = branch + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return result


class PyramidNet(ResidualNetwork):
    """A 3×3 convolution, three stages of widening blocks, BN-ReLU and a linear layer."""

    def __init__(self, depth: int, alpha: int, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stages = 3
        per_stage = (depth - 2) // 6
        widths = [round(16 + alpha * index / (3 * per_stage)) for index in range(3 * per_stage + 1)]
        for stage in range(3):
            first = stage * per_stage
            blocks = [
                PyramidBlock(widths[index], widths[index + 1], 2 if index == first > 0 else 1)
                for index in range(first, first + per_stage)
            ]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.bn_final = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        kaiming_fan_out_(self)

    def stem(self, images: Tensor) -> Tensor:
        """Apply the convolution and its batch norm, without an activation."""
        x: Tensor = self.bn1(self.conv1(images))
        return x

    def activate(self, features: Tensor) -> Tensor:
        """Apply the final BN-ReLU."""
        return F.relu(self.bn_final(features))


def pyramidnet110_a48(num_classes: int = 10, in_channels: int = 3) -> PyramidNet:
    """Build PyramidNet-110 with widening factor α = 48: from 16 to 64 channels in 54 blocks.

    Convolutions start from N(0, 2 / fan_out), the linear layer from torch's default.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> pyramidnet110_a48(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    return PyramidNet(110, 48, num_classes, in_channels)
