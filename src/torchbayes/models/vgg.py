"""VGG in the usual CIFAR form: the published convolution stacks and a single linear layer.

References:
    Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition",
    ICLR 2015 (configurations A and D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ._input import require_images, require_positive
from ._residual import kaiming_fan_out_

# Convolutions in each stage; every stage ends with 2×2 max pooling.
_VGG11 = (1, 1, 2, 2, 2)
_VGG16 = (2, 2, 3, 3, 3)
_WIDTHS = (1, 2, 4, 8, 8)  # of the stages, in multiples of the first one's


class VGG(nn.Module):
    """Stages of 3×3 convolutions with max pooling between them; see `vgg11`."""

    def __init__(
        self, stages: Sequence[int], num_classes: int, in_channels: int, batch_norm: bool, width: int
    ) -> None:  # fmt: skip
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels, width=width)
        self.in_channels = in_channels
        layers: list[nn.Module] = []
        channels = in_channels
        for convolutions, multiple in zip(stages, _WIDTHS, strict=True):
            for _ in range(convolutions):
                layers.append(nn.Conv2d(channels, multiple * width, 3, padding=1))
                channels = multiple * width
                if batch_norm:
                    layers.append(nn.BatchNorm2d(channels))
                layers.append(nn.ReLU())
            # Rounding up keeps 28×28 images alive (28-14-7-4-2-1); 32×32 divides evenly.
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        kaiming_fan_out_(self)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        features = F.adaptive_avg_pool2d(self.features(images), 1)
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


def vgg11(
    num_classes: int = 10, in_channels: int = 3, batch_norm: bool = True, width: int = 64
) -> VGG:
    """Build VGG-11 for small images; with batch norm this is the VGG-11-BN of the HWA experiments.

    Convolutions start from N(0, 2 / fan_out), the linear layer from N(0, 0.01²), biases from 0.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        batch_norm: Whether batch norm follows every convolution, as in the common CIFAR ports.
        width: Channels of the first stage; the others have 2, 4, 8 and 8 times as many.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> vgg11(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    return VGG(_VGG11, num_classes, in_channels, batch_norm, width)


def vgg16(
    num_classes: int = 10, in_channels: int = 3, batch_norm: bool = True, width: int = 64
) -> VGG:
    """Build VGG-16 for small images; arguments and initialisation as `vgg11`.

    Example:
        >>> import torch
        >>> vgg16()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VGG(_VGG16, num_classes, in_channels, batch_norm, width)
