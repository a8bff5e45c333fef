"""Wide residual networks: pre-activation blocks, k times the usual number of channels.

References:
    Zagoruyko and Komodakis, "Wide residual networks", BMVC 2016.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._residual import ResidualNetwork, kaiming_fan_out_


class WideBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-conv and a shortcut.

    Where the shape changes, the shortcut is a 1×1 convolution of the same normalised and rectified
    input that the first convolution sees.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        active = F.relu(self.bn1(x))
        branch = self.conv2(F.relu(self.bn2(self.conv1(active))))
        result: Tensor = branch + (x if self.shortcut is None else self.shortcut(active))
        return result


class WideResNet(ResidualNetwork):
    """A 3×3 convolution, three stages of blocks, BN-ReLU, average pooling and a linear layer."""

    def __init__(self, depth: int, k: int, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels, depth=depth, k=k)
        per_stage, remainder = divmod(depth - 4, 6)
        if remainder or per_stage < 1:
            raise ValueError(f"depth must be 6·n + 4 (10, 16, 22, 28, …), got {depth}")
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        channels = self.add_stages(WideBlock, 16, 16 * k, (per_stage,) * 3)
        self.bn1 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, num_classes)
        kaiming_fan_out_(self)
        nn.init.zeros_(self.fc.bias)

    def stem(self, images: Tensor) -> Tensor:
        """Apply the convolution alone: blocks start with their own BN-ReLU."""
        x: Tensor = self.conv1(images)
        return x

    def activate(self, features: Tensor) -> Tensor:
        """Apply the final BN-ReLU."""
        return F.relu(self.bn1(features))


def wide_resnet(depth: int, k: int, num_classes: int = 10, in_channels: int = 3) -> WideResNet:
    """Build the wide residual network WRN-`depth`-`k`.

    Convolutions start from N(0, 2 / fan_out), the linear layer from torch's default with bias 0.

    Args:
        depth: Number of convolutions on the longest path, 6·n + 4 with n blocks in each stage.
        k: Widening factor; the stages have 16k, 32k and 64k channels.
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> wide_resnet(16, 2)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return WideResNet(depth, k, num_classes, in_channels)
