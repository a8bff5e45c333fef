"""ResNet-18 and ResNet-50, with the ImageNet stem or (for 18) the CIFAR stem.

Parameter names are torchvision's, so that its checkpoints load. The VOGN paper trains ResNet-18 on
CIFAR-10 with the ImageNet stem, which leaves a 1×1 map in the last stage and explains its
comparatively low accuracy; ResNet-18 on CIFAR usually means the CIFAR stem.

References:
    He et al., "Deep residual learning for image recognition", CVPR 2016.
    Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ._residual import ResidualNetwork, kaiming_fan_out_


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return the 1×1 convolution and norm of a shortcut that changes shape, else None."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, ReLU after the addition."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 (strided, optionally grouped) and 1×1 convolutions and a shortcut."""

    def __init__(
        self, in_channels: int, width: int, out_channels: int, stride: int, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return F.relu(branch + (x if self.downsample is None else self.downsample(x)))


class ResNet(ResidualNetwork):
    """A stem, four stages of residual blocks, average pooling and a linear layer."""

    def __init__(
        self, block: Callable[[int, int, int], BasicBlock | Bottleneck], width: int,
        depths: Sequence[int], num_classes: int, in_channels: int, stem: str, zero_init_residual: bool,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, in_channels)
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        elif stem == "cifar":
            self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            raise ValueError(f"stem must be 'imagenet' or 'cifar', got {stem!r}")
        self.bn1 = nn.BatchNorm2d(64)
        self.fc = nn.Linear(self.add_stages(block, 64, width, depths), num_classes)
        kaiming_fan_out_(self)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, Bottleneck):
                    nn.init.zeros_(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def stem(self, images: Tensor) -> Tensor:
        """Apply the first convolution and the pooling."""
        x: Tensor = self.maxpool(super().stem(images))
        return x


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    stem: Literal["imagenet", "cifar"] = "imagenet",
    zero_init_residual: bool = False,
) -> ResNet:
    """Build ResNet-18.

    Convolutions start from N(0, 2 / fan_out), the linear layer from torch's default.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem: `"imagenet"` (7×7 stride 2, then 3×3 max pooling stride 2; also what the VOGN paper
            uses on CIFAR) or `"cifar"` (3×3 stride 1).
        zero_init_residual: Start the last batch-norm scale of every block at 0, as the VOGN paper's
            Adam and SGD baselines do.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> resnet18(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    return ResNet(BasicBlock, 64, (2, 2, 2, 2), num_classes, in_channels, stem, zero_init_residual)


def resnet50(
    num_classes: int = 10, in_channels: int = 3, zero_init_residual: bool = False
) -> ResNet:
    """Build ResNet-50 with the ImageNet stem and the stride on the 3×3 convolutions.

    Arguments and initialisation are those of `resnet18`.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     resnet50(num_classes=1000)(torch.zeros(2, 3, 224, 224)).shape
        torch.Size([2, 1000])
    """

    def block(channels: int, out_channels: int, stride: int) -> Bottleneck:
        return Bottleneck(channels, out_channels // 4, out_channels, stride)

    depths = (3, 4, 6, 3)
    return ResNet(block, 256, depths, num_classes, in_channels, "imagenet", zero_init_residual)
