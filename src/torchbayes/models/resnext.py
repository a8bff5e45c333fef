"""ResNeXt-29 (8×64d) for CIFAR: bottleneck blocks with a grouped 3×3 convolution.

References:
    Xie et al., "Aggregated residual transformations for deep neural networks", CVPR 2017,
    section 5.3 (form C of the block, projection shortcuts where the shape changes).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._init import kaiming_fan_out_
from ._input import require_images, require_positive
from .resnet import Bottleneck


class ResNeXt(nn.Module):
    """A 3×3 convolution, three stages of grouped bottlenecks and a linear layer."""

    def __init__(
        self, depth: int, cardinality: int, base_width: int, num_classes: int, in_channels: int
    ) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels)
        self.in_channels = in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels = 64
        stages: list[nn.Sequential] = []
        for stage in range(3):
            width, out_channels = cardinality * base_width * 2**stage, 256 * 2**stage
            blocks: list[nn.Module] = []
            for index in range((depth - 2) // 9):
                stride = 2 if index == 0 and stage > 0 else 1
                blocks.append(Bottleneck(channels, width, out_channels, stride, cardinality))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(channels, num_classes)
        kaiming_fan_out_(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnext29_8x64d(num_classes: int = 10, in_channels: int = 3) -> ResNeXt:
    """Build ResNeXt-29 with cardinality 8 and base width 64.

    Convolutions start from N(0, 2 / fan_out), the linear layer as torch has it with bias 0.

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
