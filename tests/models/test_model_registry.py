"""The registry: names, options, what each model is given from the shape of the data."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from torchbayes import models
from torchbayes.models import MODELS, build_model, mlp


def test_names() -> None:
    assert set(MODELS) == {
        *("mlp", "lenet5", "alexnet", "fastnet", "vgg11", "vgg16"),
        *("resnet8", "resnet18", "resnet18-cifar", "resnet20", "resnet50", "resnet56"),
        *("resnetpp8", "resnetpp20", "resnetpp50", "resnetpp56"),
        *("wrn-10-1", "wrn-16-2", "wrn-16-4", "wrn-28-1", "wrn-28-4", "wrn-28-10"),
        *("resnext29-8x64d", "pyramidnet110-a48"),
    }


def test_entries_are_frozen_and_described_in_one_line() -> None:
    for name, entry in MODELS.items():
        assert entry.name == name
        assert 10 < len(entry.summary) < 70
        assert "\n" not in entry.summary
        assert entry.source[-4:].isdigit()
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"  # type: ignore[misc]


def test_shape_decides_channels_and_size() -> None:
    with torch.device("meta"):
        small = build_model("lenet5", input_shape=(1, 28, 28), num_classes=10)
        assert small.get_parameter("conv1.weight").shape[1] == 1
        assert small.get_parameter("fc1.weight").shape[1] == 16 * 4 * 4
        flat = build_model("mlp", input_shape=(3, 4, 5), num_classes=2)
        assert flat.get_parameter("layers.0.weight").shape == (1200, 60)


def test_digits_and_moons() -> None:
    model = build_model("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=[32])
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    model = build_model("mlp", input_shape=(2,), num_classes=2, hidden=(16, 16))
    assert model(torch.zeros(5, 2)).shape == (5, 2)


def test_options_reach_the_constructor() -> None:
    def norms(model: nn.Module) -> int:
        return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    with torch.device("meta"):
        shape = (3, 32, 32)
        assert norms(build_model("vgg11", input_shape=shape, num_classes=10)) == 8
        plain = build_model("vgg11", input_shape=shape, num_classes=10, batch_norm=False)
        assert norms(plain) == 0
        wide = build_model("resnet56", input_shape=shape, num_classes=10, width=32)
        assert wide.get_parameter("conv1.weight").shape[0] == 32
        cifar = build_model("resnet18", input_shape=shape, num_classes=10, stem="cifar")
        assert cifar.get_parameter("conv1.weight").shape[-1] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "lenet"}, "unknown model 'lenet': did you mean 'lenet5'\\?"),
        ({"name": "WRN_28_10"}, "did you mean 'wrn-28-10'\\?"),
        ({"name": "zzz"}, "unknown model 'zzz': choose from mlp, lenet5, .*48$"),
        (
            {"name": "resnet20", "widht": 3},
            "'resnet20' has no option 'widht' \\(its options are width, batch_norm\\), "
            "did you mean 'width'\\?",
        ),
        ({"name": "alexnet", "width": 3}, "'alexnet' has no option 'width' \\(it has none\\)$"),
        ({"name": "wrn-28-4", "depth": 16}, "'wrn-28-4' has no option 'depth'"),
        ({"name": "resnet18-cifar", "stem": "imagenet"}, "has no option 'stem'"),
        ({"name": "lenet5", "in_channels": 1}, "has no option 'in_channels'"),
        ({"name": "lenet5", "input_shape": (2,)}, "got input_shape \\(2,\\): use 'mlp'"),
        ({"name": "lenet5", "input_shape": (1, 8, 8)}, "at least 16×16 pixels"),
        ({"name": "mlp", "input_shape": (0, 8)}, "every size in input_shape must be .* got 0"),
        ({"name": "mlp", "num_classes": 0}, "num_classes must be .* got 0"),
    ],
)
def test_bad_requests_give_one_sentence(arguments: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"input_shape": (1, 28, 28), "num_classes": 10, **arguments}
    with pytest.raises(ValueError, match=message) as error:
        build_model(**request)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_constructors_are_importable_by_their_own_names() -> None:
    assert models.mlp is mlp
    for name in models.__all__:
        assert hasattr(models, name)


def test_models_import_no_other_part_of_the_library() -> None:
    files = list(Path(models.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, file.name  # ".x" is a sibling, "..x" another part
                if node.level == 0:
                    assert not (node.module or "").startswith("torchbayes"), file.name
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("torchbayes") for alias in node.names)
