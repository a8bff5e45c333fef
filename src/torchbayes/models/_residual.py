"""What the residual families share: stages of blocks, the forward pass and the initialisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ._input import require_images, require_positive


class ResidualNetwork(nn.Module):
    """A stem, stages of residual blocks, average pooling and a linear layer.

    A subclass sets `conv1`, `bn1` and `fc` and calls `add_stages`, in the order in which its
    parameters are to be listed and initialised.
    """

    conv1: nn.Module
    bn1: nn.Module
    fc: nn.Module

    def __init__(self, num_classes: int, in_channels: int, **sizes: int) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, in_channels=in_channels, **sizes)
        self.in_channels = in_channels

    def add_stages(
        self, block: Callable[[int, int, int], nn.Module],
        channels: int, width: int, depths: Sequence[int],
    ) -> int:  # fmt: skip
        """Add `layer1`, `layer2`, …, each later one at half the resolution and twice the width.

        Args:
            block: Builds a block from its input channels, output channels and stride.
            channels: Input channels of the first block.
            width: Output channels of the first stage.
            depths: Blocks in each stage.

        Returns:
            The output channels of the last stage.
        """
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                out = width * 2**stage
                blocks.append(block(channels, out, 2 if index == 0 and stage > 0 else 1))
                channels = out
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        return channels

    def stem(self, images: Tensor) -> Tensor:
        """Apply the layers before the first stage."""
        return F.relu(self.bn1(self.conv1(images)))

    def activate(self, features: Tensor) -> Tensor:
        """Apply what follows the last stage: nothing, unless blocks end without an activation."""
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        require_images(images, self.in_channels)
        x = self.stem(images)
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(self.activate(x), 1).flatten(1))
        return logits


def kaiming_fan_out_(model: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan_out) and zero its bias, in place.

    `fan_out` is the number of output channels times the kernel area, also for a grouped
    convolution, as in the authors' code of ResNet, ResNeXt, wide ResNet and PyramidNet. Batch norm
    keeps torch's scale 1 and shift 0.

    References:
        He et al., "Delving deep into rectifiers", ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
