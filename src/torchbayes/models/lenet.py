"""LeNet-5 in the form of the VOGN experiments: ReLU, max pooling, no normalisation.

References:
    LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 1998.
    Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._input import require_images, require_positive


class LeNet5(nn.Module):
    """Two 5×5 convolutions and three linear layers; see `lenet5`."""

    def __init__(self, num_classes: int, in_channels: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels)
        # Each unpadded 5×5 convolution removes 4 pixels, each pooling halves the rest.
        height, width = (((size - 4) // 2 - 4) // 2 for size in image_size)
        if height < 1 or width < 1:
            raise ValueError(
                f"lenet5 needs images of at least 16×16 pixels, got image_size={image_size}: "
                "use mlp for smaller ones"
            )
        self.in_channels = in_channels
        self.image_size = image_size
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * height * width, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        if tuple(images.shape[2:]) != self.image_size:
            raise ValueError(
                f"this lenet5 takes images of {self.image_size} pixels, got "
                f"{tuple(images.shape[2:])}: build it with that image_size"
            )
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


def lenet5(
    num_classes: int = 10, in_channels: int = 3, image_size: int | tuple[int, int] = 32
) -> LeNet5:
    """Build LeNet-5: conv 6 and 16 (5×5, unpadded), linear 120, 84 and `num_classes`.

    Weights keep torch's default initialisation, as in the VOGN experiments.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images, at least 16; one number for a square.

    Returns:
        The network.

    Example:
        >>> import torch
        >>> lenet5(in_channels=1, image_size=28)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(size) != 2:
        raise ValueError(f"image_size must be one number or (height, width), got {image_size!r}")
    return LeNet5(num_classes, in_channels, (size[0], size[1]))
