"""Fully connected networks, e.g. the 2×1200 network of Bayes by Backprop.

References:
    Blundell et al., "Weight uncertainty in neural networks", ICML 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from ._input import require_positive


class MLP(nn.Module):
    """Linear layers with ReLU between them; see `mlp`."""

    def __init__(self, in_features: int, num_classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        require_positive(in_features=in_features, num_classes=num_classes)
        if isinstance(hidden, int | str):
            raise ValueError(f"hidden must be a sequence such as (100, 100), got {hidden!r}")
        for width in hidden:
            require_positive(**{"every width in hidden": width})
        self.in_features = in_features
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Flatten each example and return one row of outputs for it."""
        if inputs.dim() < 2 or math.prod(inputs.shape[1:]) != self.in_features:
            raise ValueError(
                f"expected a batch of examples of {self.in_features} values each, got shape "
                f"{tuple(inputs.shape)}: reshape it or build the model with another in_features"
            )
        outputs: Tensor = self.layers(inputs.flatten(1))
        return outputs


def mlp(in_features: int, num_classes: int = 10, hidden: Sequence[int] = (1200, 1200)) -> MLP:
    """Build a fully connected ReLU network.

    Weights keep torch's default initialisation, U(±1/√fan_in).

    Args:
        in_features: Values per example; inputs of any shape are flattened.
        num_classes: Number of outputs: classes or regression targets.
        hidden: Widths of the hidden layers; `()` gives a linear model.

    Returns:
        The network.

    Example:
        >>> import torch
        >>> mlp(28 * 28)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    return MLP(in_features, num_classes, hidden)
