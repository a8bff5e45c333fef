"""Plain networks to make Bayesian: nothing in them knows about posteriors.

Constructors are functions (`lenet5(num_classes=10, in_channels=1, image_size=28)`); the registry
`MODELS` lists them under their command-line names, and `build_model` builds one for data of a given
shape. Constructors draw only from torch's global generator, so `torch.manual_seed` fixes the
initial weights. Activations are never in place, so that backward hooks on any layer work.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ._input import require_positive
from .alexnet import alexnet
from .cifar_resnet import resnet8, resnet20, resnet56
from .fastnet import fastnet
from .lenet import lenet5
from .mlp import mlp
from .pyramidnet import pyramidnet110_a48
from .resnet import ResNet, resnet18, resnet50
from .resnetpp import resnetpp8, resnetpp20, resnetpp50, resnetpp56
from .resnext import resnext29_8x64d
from .vgg import vgg11, vgg16
from .wide_resnet import wide_resnet

__all__ = [
    "MODELS",
    "ModelEntry",
    "alexnet",
    "build_model",
    "fastnet",
    "lenet5",
    "mlp",
    "pyramidnet110_a48",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet50",
    "resnet56",
    "resnetpp8",
    "resnetpp20",
    "resnetpp50",
    "resnetpp56",
    "resnext29_8x64d",
    "vgg11",
    "vgg16",
    "wide_resnet",
]


@dataclass(frozen=True)
class ModelEntry:
    """An entry of the model registry.

    Attributes:
        name: Name on the command line.
        build: Constructor; takes keyword arguments.
        summary: One-line description.
        source: Publication.
    """

    name: str
    build: Callable[..., nn.Module]
    summary: str
    source: str


def _resnet18_cifar(
    num_classes: int = 10, in_channels: int = 3, zero_init_residual: bool = False
) -> ResNet:
    return resnet18(num_classes, in_channels, "cifar", zero_init_residual)


_LENET = "LeCun et al. 1998, in the form of Osawa et al. 2019"
_ALEXNET = "Krizhevsky 2014, in the form of Osawa et al. 2019"
_VGG = "Simonyan and Zisserman 2015"
_RESNET = "He et al. 2016"
_RESNETPP = "Heek and Kalchbrenner 2019"
_WRN = "Zagoruyko and Komodakis 2016"

MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry("mlp", mlp, "ReLU network, two hidden layers of 1200", "Blundell et al. 2015"),
        ModelEntry("lenet5", lenet5, "two convolutions, three linear layers", _LENET),
        ModelEntry("alexnet", alexnet, "five convolutions, for small images", _ALEXNET),
        ModelEntry(
            "fastnet", fastnet, "six wide convolutions, learns in a few epochs", "Jordan 2024"
        ),
        ModelEntry("vgg11", vgg11, "8 convolutions with batch norm, for small images", _VGG),
        ModelEntry("vgg16", vgg16, "13 convolutions with batch norm, for small images", _VGG),
        ModelEntry("resnet18", resnet18, "basic blocks, ImageNet stem (as in VOGN)", _RESNET),
        ModelEntry("resnet18-cifar", _resnet18_cifar, "basic blocks, CIFAR stem", _RESNET),
        ModelEntry("resnet50", resnet50, "bottleneck blocks, ImageNet stem", _RESNET),
        ModelEntry("resnet8", resnet8, "thin ResNet for CIFAR, 0.08 M weights", _RESNET),
        ModelEntry("resnet20", resnet20, "thin ResNet for CIFAR, 0.27 M weights", _RESNET),
        ModelEntry("resnet56", resnet56, "thin ResNet for CIFAR, 0.85 M weights", _RESNET),
        ModelEntry("resnetpp8", resnetpp8, "smallest ResNet++, no batch norm", _RESNETPP),
        ModelEntry("resnetpp20", resnetpp20, "small ResNet++, no batch norm", _RESNETPP),
        ModelEntry("resnetpp56", resnetpp56, "ResNet++ for CIFAR, no batch norm", _RESNETPP),
        ModelEntry("resnetpp50", resnetpp50, "ResNet++ for ImageNet, no batch norm", _RESNETPP),
        *(
            ModelEntry(
                f"wrn-{depth}-{k}", partial(wide_resnet, depth, k), f"wide ResNet, {size}", _WRN
            )
            for depth, k, size in (
                (10, 1, "0.08 M weights"),
                (16, 2, "0.7 M weights"),
                (16, 4, "2.7 M weights"),
                (28, 1, "0.4 M weights"),
                (28, 4, "5.8 M weights"),
                (28, 10, "36.5 M weights"),
            )
        ),
        ModelEntry(
            "resnext29-8x64d", resnext29_8x64d, "grouped bottlenecks for CIFAR", "Xie et al. 2017"
        ),
        ModelEntry(
            "pyramidnet110-a48", pyramidnet110_a48, "slowly widening ResNet", "Han et al. 2017"
        ),
    )
}

_FROM_DATA = ("in_features", "in_channels", "image_size", "num_classes")


def build_model(
    name: str, *, input_shape: tuple[int, ...], num_classes: int, **options: Any
) -> nn.Module:
    """Build a registered model for data of a given shape.

    Args:
        name: A key of `MODELS`.
        input_shape: Shape of one example without the batch dimension: (channels, height, width)
            for images, any shape for `mlp`.
        num_classes: Number of classes, or of regression targets.
        **options: Other arguments of the constructor, such as `hidden` of `mlp`.

    Returns:
        The network.

    Raises:
        ValueError: If the name or an option is unknown (the nearest known one is suggested), or
            the model does not support data of this shape.

    Example:
        >>> build_model("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=(32,)).in_features
        64
        >>> build_model("lenet", input_shape=(1, 28, 28), num_classes=10)
        Traceback (most recent call last):
        ValueError: unknown model 'lenet': did you mean 'lenet5'?
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(MODELS)}"
        raise ValueError(f"unknown model {name!r}: {hint}")
    build = MODELS[name].build
    accepted = list(inspect.signature(build).parameters)
    known = [argument for argument in accepted if argument not in _FROM_DATA]
    for option in options:
        if option not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none"
            near = difflib.get_close_matches(option, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"model {name!r} has no option {option!r} ({valid}){hint}")
    for size in input_shape:
        require_positive(**{"every size in input_shape": size})
    data: dict[str, Any] = {"num_classes": num_classes}
    if "in_features" in accepted:
        data["in_features"] = math.prod(input_shape)
    elif len(input_shape) == 3:
        data["in_channels"] = input_shape[0]
        if "image_size" in accepted:
            data["image_size"] = (input_shape[1], input_shape[2])
    else:
        raise ValueError(
            f"model {name!r} takes images of shape (channels, height, width), got input_shape "
            f"{tuple(input_shape)}: use 'mlp' for other data"
        )
    return build(**data, **options)
