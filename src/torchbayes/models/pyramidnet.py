"""PyramidNet-110 (α = 48) for CIFAR: channels grow a little with every block.

References:
    Han, Kim and Kim, "Deep pyramidal residual networks", CVPR 2017 (additive widening, eq. 3;
    blocks without the first ReLU and with a last batch norm; zero-padded shortcuts).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._init import kaiming_fan_out_
from ._input import require_images, require_positive


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


class PyramidNet(nn.Module):
    """A 3×3 convolution, three stages of widening blocks, BN-ReLU and a linear layer."""

    def __init__(self, depth: int, alpha: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels)
        self.in_channels = in_channels
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        per_stage = (depth - 2) // 6
        total = 3 * per_stage
        widths = [round(16 + alpha * index / total) for index in range(total + 1)]
        blocks = [
            PyramidBlock(
                widths[index],
                widths[index + 1],
                stride=2 if index in (per_stage, 2 * per_stage) else 1,
            )
            for index in range(total)
        ]
        self.layer1 = nn.Sequential(*blocks[:per_stage])
        self.layer2 = nn.Sequential(*blocks[per_stage : 2 * per_stage])
        self.layer3 = nn.Sequential(*blocks[2 * per_stage :])
        self.bn_final = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        kaiming_fan_out_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        x = self.bn1(self.conv1(images))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.relu(self.bn_final(x))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def pyramidnet110_a48(num_classes: int = 10, in_channels: int = 3) -> PyramidNet:
    """Build PyramidNet-110 with widening factor α = 48: from 16 to 64 channels in 54 blocks.

    Convolutions start from N(0, 2 / fan_out), the linear layer as torch has it.

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
