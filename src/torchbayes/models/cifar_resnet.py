"""The thin residual networks of He et al. for CIFAR: ResNet-20 and ResNet-56, and a ResNet-8.

Shortcuts are the paper's option A for CIFAR: identity, subsampled and padded with zero channels
where the shape changes, so a shortcut has no parameters (option B would add 2,752 at the default
width).

References:
    He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2.
    De and Smith, "Batch normalization biases residual blocks towards the identity function in deep
    networks", NeurIPS 2020 (the branch scale without batch norm).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._residual import ResidualNetwork, kaiming_fan_out_


class CifarBlock(nn.Module):
    """Two 3×3 convolutions and a parameter-free shortcut, ReLU after the addition."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        bias = not batch_norm
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(out_channels) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(out_channels) if batch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(branch + shortcut)


class CifarResNet(ResidualNetwork):
    """A 3×3 convolution, three stages of blocks, average pooling and a linear layer."""

    def __init__(
        self, depth: int, num_classes: int, in_channels: int, width: int, batch_norm: bool
    ) -> None:
        super().__init__(num_classes, in_channels, width=width)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=not batch_norm)
        self.bn1 = nn.BatchNorm2d(width) if batch_norm else nn.Identity()
        depths = ((depth - 2) // 6,) * 3
        block = partial(CifarBlock, batch_norm=batch_norm)
        self.fc = nn.Linear(self.add_stages(block, width, width, depths), num_classes)
        kaiming_fan_out_(self)
        if not batch_norm:
            # Every He-initialised branch doubles the variance of the stream; scaled by L^(-1/2)
            # the L branches together multiply it by no more than e.
            with torch.no_grad():
                for module in self.modules():
                    if isinstance(module, CifarBlock):
                        module.conv2.weight.mul_(sum(depths) ** -0.5)


def resnet8(
    num_classes: int = 10, in_channels: int = 3, width: int = 16, batch_norm: bool = True
) -> CifarResNet:
    """Build ResNet-8, the smallest of this family; arguments and initialisation as `resnet20`.

    Example:
        >>> import torch
        >>> resnet8()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return CifarResNet(8, num_classes, in_channels, width, batch_norm)


def resnet20(
    num_classes: int = 10, in_channels: int = 3, width: int = 16, batch_norm: bool = True
) -> CifarResNet:
    """Build the ResNet-20 of He et al. for small images.

    Convolutions start from N(0, 2 / fan_out), the linear layer from torch's default.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first stage; the others have two and four times as many.
        batch_norm: Whether batch norm follows every convolution. Without it convolutions have a
            bias and the last one of each of the L blocks starts L^(-1/2) times smaller.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> resnet20(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    return CifarResNet(20, num_classes, in_channels, width, batch_norm)


def resnet56(
    num_classes: int = 10, in_channels: int = 3, width: int = 16, batch_norm: bool = True
) -> CifarResNet:
    """Build the ResNet-56 of He et al.; arguments and initialisation as `resnet20`.

    Example:
        >>> import torch
        >>> resnet56()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return CifarResNet(56, num_classes, in_channels, width, batch_norm)
