"""The rule for each torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torchbayes.curvature.composite import CELLS, LAYERS, recurrent, recurrent_cell
from torchbayes.curvature.conv import conv, conv_transpose
from torchbayes.curvature.embedding import embedding
from torchbayes.curvature.linear import linear
from torchbayes.curvature.norm import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    prelu,
    rms_norm,
)  # fmt: skip

__all__ = ["RULES"]

RULES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.conv1d: conv,
    torch.conv2d: conv,
    torch.conv3d: conv,
    torch.conv_transpose1d: conv_transpose,
    torch.conv_transpose2d: conv_transpose,
    torch.conv_transpose3d: conv_transpose,
    torch.embedding: embedding,
    torch.batch_norm: batch_norm,
    torch.layer_norm: layer_norm,
    torch.rms_norm: rms_norm,
    torch.group_norm: group_norm,
    torch.instance_norm: instance_norm,
    torch.prelu: prelu,
    **dict.fromkeys(LAYERS, recurrent),
    **dict.fromkeys(CELLS, recurrent_cell),
}
"""The rule of each torch function, called with the capture, the function and the function's arguments."""
