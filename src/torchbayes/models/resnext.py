"""ResNeXt-29 (8×64d) for CIFAR: bottleneck blocks with a grouped 3×3 convolution.

References:
    Xie et al., "Aggregated residual transformations for deep neural networks", CVPR 2017,
    section 5.3 (form C of the block, projection shortcuts where the shape changes).
"""

from __future__ import annotations

from torch import nn

from ._residual import ResidualNetwork, kaiming_fan_out_
from .resnet import Bottleneck


class ResNeXt(ResidualNetwork):
    """A 3×3 convolution, three stages of grouped bottlenecks and a linear layer."""

    def __init__(
        self, depth: int, cardinality: int, base_width: int, num_classes: int, in_channels: int
    ) -> None:
        super().__init__(num_classes, in_channels)
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)

        def block(channels: int, out_channels: int, stride: int) -> Bottleneck:
            width = cardinality * base_width * out_channels // 256
            return Bottleneck(channels, width, out_channels, stride, cardinality)

        self.fc = nn.Linear(self.add_stages(block, 64, 256, ((depth - 2) // 9,) * 3), num_classes)
        kaiming_fan_out_(self)
        nn.init.zeros_(self.fc.bias)


def resnext29_8x64d(num_classes: int = 10, in_channels: int = 3) -> ResNeXt:
    """Build ResNeXt-29 with cardinality 8 and base width 64.

    Convolutions start from N(0, 2 / fan_out), the linear layer from torch's default with bias 0.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     resnext29_8x64d()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNeXt(29, 8, 64, num_classes, in_channels)
