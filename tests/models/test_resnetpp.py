"""ResNet++ against a transcription of section 4 of the ATMC paper."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.models.resnetpp import (
    BasicBlockPP,
    BottleneckPP,
    WeightNormConv2d,
    WeightNormLinear,
    resnetpp20,
    resnetpp50,
    resnetpp56,
)

Weights = dict[str, Tensor]


def selu(x: Tensor) -> Tensor:
    """Klambauer et al. 2017, Eq. (2), with their λ and α."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * torch.where(x > 0, x, alpha * (torch.exp(x.clamp(max=0)) - 1))


def theta(weights: Weights, layer: str) -> Tensor:
    """Eq. (12), one output feature after the other."""
    scale, direction = weights[f"{layer}.scale"], weights[f"{layer}.direction"]
    return torch.stack(
        [s * d / (d * d).sum().sqrt() for s, d in zip(scale, direction, strict=True)]
    )


def conv(weights: Weights, layer: str, x: Tensor, stride: int = 1) -> Tensor:
    kernel = theta(weights, layer)
    return F.conv2d(
        x, kernel, weights.get(f"{layer}.bias"), stride=stride, padding=kernel.shape[-1] // 2
    )


def block(weights: Weights, name: str, x: Tensor, stride: int, convolutions: int) -> Tensor:
    """SELU between the convolutions of the branch and after the addition."""
    branch = x
    for index in range(1, convolutions + 1):
        # The stride is on the 3×3 convolution: the first of two, the second of three.
        strided = stride if index == convolutions - 1 else 1
        branch = conv(
            weights, f"{name}.conv{index}", branch if index == 1 else selu(branch), strided
        )
    if f"{name}.shortcut.direction" in weights:
        x = conv(weights, f"{name}.shortcut", x, stride)
    return selu(x + branch)


def forget_the_initialisation(model: torch.nn.Module) -> Weights:
    """Move every parameter, so that biases, scales and lengths of directions all matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return dict(model.double().named_parameters())


def test_resnetpp20_forward() -> None:
    torch.manual_seed(0)
    model = resnetpp20(num_classes=4, in_channels=2, width=5)
    weights = forget_the_initialisation(model)
    images = torch.randn(3, 2, 13, 10).double()
    x = selu(conv(weights, "conv1", images))
    for stage in (1, 2, 3):
        for index in range(3):
            stride = 2 if stage > 1 and index == 0 else 1
            x = block(weights, f"layer{stage}.{index}", x, stride, convolutions=2)
    logits = x.mean(dim=(2, 3)) @ theta(weights, "fc").T + weights["fc.bias"]
    torch.testing.assert_close(model(images), logits)


def test_resnetpp50_forward() -> None:
    torch.manual_seed(0)
    model = resnetpp50(num_classes=4, in_channels=2, width=3)
    weights = forget_the_initialisation(model)
    images = torch.randn(2, 2, 40, 33).double()
    x = F.max_pool2d(selu(conv(weights, "conv1", images, stride=2)), 3, stride=2, padding=1)
    for stage, depth in ((1, 3), (2, 4), (3, 6), (4, 3)):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            x = block(weights, f"layer{stage}.{index}", x, stride, convolutions=3)
    logits = x.mean(dim=(2, 3)) @ theta(weights, "fc").T + weights["fc.bias"]
    torch.testing.assert_close(model(images), logits)


def test_resnetpp56_has_nine_blocks_in_each_of_three_stages_of_width_32() -> None:
    with torch.device("meta"):
        model = resnetpp56()
    blocks = [name for name, module in model.named_modules() if isinstance(module, BasicBlockPP)]
    assert blocks == [f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(9)]
    widths = [model.get_parameter(f"layer{stage}.8.conv2.scale").numel() for stage in (1, 2, 3)]
    assert widths == [32, 64, 128]


@pytest.mark.parametrize("factor", [1e-3, 0.5, 40.0])
def test_the_length_of_a_direction_does_not_matter(factor: float) -> None:
    torch.manual_seed(0)
    model = resnetpp20(width=4).double()
    x = torch.randn(2, 3, 8, 8).double()
    before = model(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("direction"):
                parameter.mul_(factor)
    torch.testing.assert_close(model(x), before)


def test_scale_is_the_norm_of_each_output_feature() -> None:
    torch.manual_seed(0)
    for layer in (WeightNormConv2d(3, 5, 3, scale=0.7), WeightNormLinear(6, 5)):
        with torch.no_grad():
            layer.scale.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0, 0.0]))
            layer.direction.mul_(7)
        torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), layer.scale.detach())


def test_weight_agrees_with_torch_weight_norm() -> None:
    torch.manual_seed(0)
    layer = WeightNormConv2d(3, 5, 3)
    with torch.no_grad():
        layer.scale.normal_()
        layer.direction.normal_()
    expected = torch._weight_norm(layer.direction, layer.scale.view(5, 1, 1, 1), 0)
    torch.testing.assert_close(layer.weight, expected)


def test_directions_start_at_unit_length_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    for name, parameter in resnetpp50(width=8).named_parameters():
        if name.endswith("direction"):
            norms = parameter.flatten(1).norm(dim=1)
            torch.testing.assert_close(norms, torch.ones_like(norms))
        elif name.endswith("bias"):
            assert not parameter.any()


def test_only_the_last_scale_of_a_branch_starts_small() -> None:
    for model, last in ((resnetpp20(width=4), "conv2"), (resnetpp50(width=4), "conv3")):
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                small = name.startswith("layer") and last in name
                assert torch.equal(parameter, torch.full_like(parameter, 0.1 if small else 1.0))


def test_fixup_keeps_the_branch_small_and_the_signal_alive() -> None:
    torch.manual_seed(0)
    model = resnetpp56(width=16)
    ratios: list[float] = []
    stream: list[float] = []

    def look(module: BasicBlockPP, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0]
        skip = x if module.shortcut is None else module.shortcut(x)
        branch = module.conv2(F.selu(module.conv1(x)))
        ratios.append((branch.std() / skip.std()).item())
        stream.append(output.std().item())

    for module in model.modules():
        if isinstance(module, BasicBlockPP):
            module.register_forward_hook(look)
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32))
    assert len(ratios) == 27
    # A branch that ends in weights of norm 0.1 has about 0.1 of the stream's root mean square.
    assert max(ratios) < 0.25
    assert min(stream) > 0.3
    assert max(stream) < 3


def test_blocks_have_no_batch_norm_and_separate_scale_and_direction() -> None:
    for made in (BasicBlockPP(4, 4, 1, 0.1), BottleneckPP(4, 4, 2, 0.1)):
        kinds = {name.rsplit(".", 1)[1] for name, _ in made.named_parameters()}
        assert kinds == {"scale", "direction", "bias"}
        assert not list(made.buffers())
