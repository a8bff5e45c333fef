"""Every architecture has the published number of parameters."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from torchbayes.models import (
    MODELS,
    build_model,
    mlp,
    resnet18,
    resnet20,
    resnet50,
    resnet56,
    wide_resnet,
)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Trainable parameters for 3×32×32 images and 10 classes, and where the figure is from. "zoo" is the
# table in pytorch/README.md of osmr/imgclsmob, "NeuralFuse" Table 7 of Sun et al., NeurIPS 2024,
# "reproductions" what several independent public repositories print for this architecture.
EXACT = {
    "lenet5": 62_006,  # reproductions: the layers of the network in PyTorch's CIFAR-10 tutorial
    "vgg11": 9_231_114,  # NeuralFuse
    "vgg16": 14_728_266,  # NeuralFuse
    "resnet18": 11_181_642,  # NeuralFuse, column ImageNet-10
    "resnet18-cifar": 11_173_962,  # NeuralFuse, column CIFAR-10
    "resnet50": 23_528_522,  # NeuralFuse, column ImageNet-10
    # Option A shortcuts; with option B the zoo has 272,474 and 855,770.
    "resnet20": 269_722,  # reproductions
    "resnet56": 853_018,  # reproductions
    "wrn-10-1": 77_850,  # layer by layer, by hand
    "wrn-16-2": 691_674,  # reproductions
    "wrn-16-4": 2_748_890,  # reproductions
    "wrn-28-4": 5_849_050,  # reproductions
    "wrn-28-10": 36_479_194,  # zoo
    "pyramidnet110-a48": 1_772_706,  # zoo
}

# Millions, as published, and the number of decimals given.
ROUNDED = {
    "alexnet": (2.47, 2),  # table of bearpaw/pytorch-classification
    "resnext29-8x64d": (34.43, 2),  # same table; Xie et al. 2017, Table 7 has 34.4
    "wrn-28-10": (36.5, 1),  # Zagoruyko and Komodakis 2016, Table 4
    "resnet20": (0.27, 2),  # He et al. 2016, Table 6
    "resnet56": (0.85, 2),  # He et al. 2016, Table 6
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_published_count(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, input_shape=(3, 32, 32), num_classes=10)
    assert count(model) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_published_count(name: str) -> None:
    millions, decimals = ROUNDED[name]
    with torch.device("meta"):
        model = build_model(name, input_shape=(3, 32, 32), num_classes=10)
    assert round(count(model) / 1e6, decimals) == millions


def test_imagenet_counts() -> None:
    with torch.device("meta"):
        assert count(resnet18(num_classes=1000)) == 11_689_512  # zoo, and torchvision
        assert count(resnet50(num_classes=1000)) == 25_557_032  # zoo, and torchvision


def test_mlp_of_bayes_by_backprop_has_2_4_million_weights() -> None:
    with torch.device("meta"):
        model = mlp(784)
    assert count(model) == 785 * 1200 + 1201 * 1200 + 1201 * 10
    assert round(count(model) / 1e6, 1) == 2.4  # Blundell et al. 2015, Table 2


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("vgg11", (8, 16, 32, 32, 64, 64, 64, 64)),
        ("vgg16", (8, 8, 16, 16, 32, 32, 32, 64, 64, 64, 64, 64, 64)),
    ],
)
def test_narrow_vgg_layer_by_layer(name: str, widths: tuple[int, ...]) -> None:
    """An eighth of the channels of configurations A and D, Simonyan and Zisserman 2015, Table 1."""
    model = build_model(name, input_shape=(3, 32, 32), num_classes=10, width=8)
    layers = sum(9 * i * o + 3 * o for i, o in pairwise((3, *widths)))  # bias, and batch norm's two
    assert count(model) == layers + 65 * 10
    with pytest.raises(ValueError, match="width"):
        build_model(name, input_shape=(3, 32, 32), num_classes=10, width=0)


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel**2


@pytest.mark.parametrize(("depth", "k"), [(28, 10), (28, 4), (28, 1), (16, 4), (16, 2), (10, 3)])
def test_wide_resnet_layer_by_layer(depth: int, k: int) -> None:
    n = (depth - 4) // 6
    widths = [16, 16 * k, 32 * k, 64 * k]
    expected = conv(3, 16, 3)
    for inputs, outputs in pairwise(widths):
        if inputs != outputs:
            expected += conv(inputs, outputs, 1)
        expected += 2 * inputs + conv(inputs, outputs, 3) + 2 * outputs + conv(outputs, outputs, 3)
        expected += (n - 1) * 2 * (2 * outputs + conv(outputs, outputs, 3))
    expected += 2 * widths[-1] + 10 * (widths[-1] + 1)
    with torch.device("meta"):
        assert count(wide_resnet(depth, k)) == expected


@pytest.mark.parametrize(
    ("name", "width", "blocks"), [("resnetpp20", 16, 3), ("resnetpp56", 32, 9)]
)
def test_resnetpp_cifar_layer_by_layer(name: str, width: int, blocks: int) -> None:
    def layer(inputs: int, outputs: int, kernel: int) -> int:  # direction, scale and bias
        return conv(inputs, outputs, kernel) + 2 * outputs

    widths = [width, width, 2 * width, 4 * width]
    expected = layer(3, width, 3)
    for inputs, outputs in pairwise(widths):
        expected += layer(inputs, outputs, 3) + (2 * blocks - 1) * layer(outputs, outputs, 3)
        if inputs != outputs:
            expected += conv(inputs, outputs, 1) + outputs  # a projection has no bias
    expected += 10 * (4 * width + 2)
    with torch.device("meta"):
        assert count(build_model(name, input_shape=(3, 32, 32), num_classes=10)) == expected


def test_resnetpp50_is_resnet50_with_scale_and_bias_for_batch_norm() -> None:
    # ResNet-50's batch norm has a scale and a shift per feature, weight norm a scale and a bias:
    # the difference is one missing bias per projected feature and one scale per class.
    with torch.device("meta"):
        model = build_model("resnetpp50", input_shape=(3, 224, 224), num_classes=1000)
    assert count(model) == 25_557_032 - (256 + 512 + 1024 + 2048) + 1000


def test_resnet_without_norm_trades_two_parameters_per_feature_for_a_bias() -> None:
    for build, blocks in ((resnet20, 3), (resnet56, 9)):
        features = 16 + 2 * blocks * (16 + 32 + 64)
        with torch.device("meta"):
            assert count(build()) - count(build(batch_norm=False)) == features


def test_torchvision_checkpoint_names() -> None:
    def norm(name: str) -> list[str]:
        keys = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return [f"{name}.{key}" for key in keys]

    expected = ["conv1.weight", *norm("bn1"), "fc.weight", "fc.bias"]
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            prefix = f"layer{stage}.{block}"
            for index in (1, 2):
                expected += [f"{prefix}.conv{index}.weight", *norm(f"{prefix}.bn{index}")]
            if stage > 1 and block == 0:
                expected += [f"{prefix}.downsample.0.weight", *norm(f"{prefix}.downsample.1")]
    with torch.device("meta"):
        assert sorted(resnet18().state_dict()) == sorted(expected)


def test_every_registered_model_has_a_count_check() -> None:
    elsewhere = {
        "mlp",
        "fastnet",  # test_fastnet.py
        "resnet8",
        "resnetpp8",
        "resnetpp20",
        "resnetpp50",
        "resnetpp56",
        "wrn-28-1",
    }
    assert set(MODELS) == set(EXACT) | set(ROUNDED) | elsewhere
