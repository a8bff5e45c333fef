"""ResNet-18 and ResNet-50, with the ImageNet stem or (for 18) the CIFAR stem.

Parameter names are torchvision's, so that its checkpoints load. The VOGN paper trains ResNet-18 on
CIFAR-10 with the ImageNet stem, which leaves a 1×1 map in the last stage and explains its
comparatively low accuracy; the CIFAR stem is what most others mean by ResNet-18 on CIFAR.

References:
    He et al., "Deep residual learning for image recognition", CVPR 2016.
    Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ._init import kaiming_fan_out_
from ._input import require_images, require_positive


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return the 1×1 convolution and norm of a shortcut that changes shape, else ``None``."""
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


def _basic(in_channels: int, width: int, stride: int) -> BasicBlock:
    return BasicBlock(in_channels, width, stride)


def _bottleneck(in_channels: int, width: int, stride: int) -> Bottleneck:
    return Bottleneck(in_channels, width, 4 * width, stride)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, average pooling and a linear layer."""

    def __init__(
        self,
        block: Callable[[int, int, int], BasicBlock | Bottleneck],
        expansion: int,
        depths: Sequence[int],
        num_classes: int,
        in_channels: int,
        stem: str,
        zero_init_residual: bool,
    ) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels)
        self.in_channels = in_channels
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        elif stem == "cifar":
            self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            raise ValueError(f"stem must be 'imagenet' or 'cifar', got {stem!r}.")
        self.bn1 = nn.BatchNorm2d(64)
        channels = 64
        stages: list[nn.Sequential] = []
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            blocks: list[nn.Module] = []
            for index in range(depth):
                blocks.append(block(channels, width, 2 if index == 0 and stage > 0 else 1))
                channels = width * expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, num_classes)
        kaiming_fan_out_(self)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, Bottleneck):
                    nn.init.zeros_(module.bn3.weight)
                elif isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    stem: Literal["imagenet", "cifar"] = "imagenet",
    zero_init_residual: bool = False,
) -> ResNet:
    """Build ResNet-18.

    Convolutions start from N(0, 2 / fan_out), the linear layer as torch has it.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem: ``"imagenet"`` (7×7 stride 2, then 3×3 max pooling stride 2; also what the VOGN paper
            uses on CIFAR) or ``"cifar"`` (3×3 stride 1).
        zero_init_residual: Start the last batch-norm scale of every block at 0, as the VOGN paper's
            Adam and SGD baselines do.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> resnet18(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    return ResNet(_basic, 1, (2, 2, 2, 2), num_classes, in_channels, stem, zero_init_residual)


def resnet50(
    num_classes: int = 10, in_channels: int = 3, zero_init_residual: bool = False
) -> ResNet:
    """Build ResNet-50 with the ImageNet stem and the stride on the 3×3 convolutions.

    Arguments and initialisation are those of :func:`resnet18`.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     resnet50(num_classes=1000)(torch.zeros(2, 3, 224, 224)).shape
        torch.Size([2, 1000])
    """
    return ResNet(
        _bottleneck, 4, (3, 4, 6, 3), num_classes, in_channels, "imagenet", zero_init_residual
    )
