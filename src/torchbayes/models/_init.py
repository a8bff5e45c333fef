"""The initialisation that the convolutional families share."""

from __future__ import annotations

from torch import nn


def kaiming_fan_out_(model: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan_out) and zero its bias, in place.

    ``fan_out`` is the number of output channels times the kernel area, also for a grouped
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
