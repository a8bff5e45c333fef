"""AlexNet in the CIFAR form of the VOGN experiments: no normalisation, one linear layer.

References:
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._input import require_images, require_positive


class AlexNet(nn.Module):
    """Five convolutions and a linear layer; see `alexnet`."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels)
        self.in_channels = in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 11, stride=4, padding=5)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.fc = nn.Linear(256, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        # At 32×32 every pooling divides evenly and leaves one pixel, as in the original. Rounding
        # up and averaging change nothing there and admit 28×28 and larger images.
        x = F.max_pool2d(F.relu(self.conv1(images)), 2, ceil_mode=True)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, ceil_mode=True)
        x = F.relu(self.conv3(x))
        x = F.relu(self.conv4(x))
        x = F.max_pool2d(F.relu(self.conv5(x)), 2, ceil_mode=True)
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def alexnet(num_classes: int = 10, in_channels: int = 3) -> AlexNet:
    """Build AlexNet for small images: conv 64-192-384-256-256 and one linear layer.

    Weights keep torch's default initialisation, as in the VOGN experiments.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Returns:
        The network, for images of any size.

    Example:
        >>> import torch
        >>> alexnet()(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """
    return AlexNet(num_classes, in_channels)
