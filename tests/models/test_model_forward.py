"""Shapes, gradients, seeds and errors of every shipped model, and blocks against the formulas."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torchbayes.models import (
    MODELS,
    alexnet,
    build_model,
    lenet5,
    mlp,
    resnet18,
    resnet20,
    resnet50,
    resnext29_8x64d,
    vgg11,
    wide_resnet,
)
from torchbayes.models.cifar_resnet import CifarBlock
from torchbayes.models.pyramidnet import PyramidBlock
from torchbayes.models.wide_resnet import WideBlock

SHAPES = [(1, 28, 28), (3, 32, 32)]
# wrn-28-10 and wrn-28-4 are the code of wrn-28-1 with more channels.
CHEAP = [name for name in MODELS if name not in ("wrn-28-10", "wrn-28-4")]
# The rest are quicker run than traced on the meta device.
LARGE = ("vgg16", "resnet50", "resnetpp50", "wrn-28-4", "wrn-28-10", "resnext29-8x64d")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_shape(name: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta" if name in LARGE else "cpu"), torch.no_grad():
        model = build_model(name, input_shape=shape, num_classes=7).eval()
        assert model(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    "name",
    [
        "lenet5",
        "alexnet",
        "fastnet",
        "vgg11",
        "resnet20",
        "resnetpp20",
        "wrn-16-2",
        "pyramidnet110-a48",
    ],
)
def test_forward_of_images_that_do_not_halve_evenly(name: str) -> None:
    model = build_model(name, input_shape=(2, 30, 45), num_classes=7).eval()
    assert model(torch.zeros(2, 2, 30, 45)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnetpp50", "vgg16", "alexnet"])
def test_forward_at_imagenet_size(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, input_shape=(3, 224, 224), num_classes=1000)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("model", "layer", "size"),
    [
        (resnet18, "layer4", 1),  # the VOGN paper's: 32-16-8-8-4-2-1
        (lambda: resnet18(stem="cifar"), "layer4", 4),
        (resnet20, "layer3", 8),
        (lambda: wide_resnet(16, 2), "layer3", 8),
        (resnext29_8x64d, "layer3", 8),
        (alexnet, "conv5", 2),
        (vgg11, "features", 1),
    ],
)
def test_size_of_the_last_map_at_32(model: Callable[[], nn.Module], layer: str, size: int) -> None:
    seen: list[tuple[int, ...]] = []
    with torch.device("meta"):
        network = model()
        network.get_submodule(layer).register_forward_hook(
            lambda module, args, output: seen.append(tuple(output.shape[2:]))
        )
        network(torch.empty(2, 3, 32, 32))
    assert seen == [(size, size)]


@pytest.mark.parametrize("name", CHEAP)
def test_gradient_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    # eval mode: in training mode a bias before batch norm has no gradient by definition.
    model = build_model(name, input_shape=(3, 16, 16), num_classes=3).eval()
    (model(torch.randn(2, 3, 16, 16)) * torch.randn(2, 3)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", CHEAP)
def test_the_seed_decides_the_weights(name: str) -> None:
    torch.manual_seed(3)
    first = build_model(name, input_shape=(1, 16, 16), num_classes=3)
    torch.manual_seed(3)
    second = build_model(name, input_shape=(1, 16, 16), num_classes=3)
    twin = second.state_dict()
    assert first.state_dict().keys() == twin.keys()
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, twin[key]), key
        if tensor.dim() > 1:
            assert tensor.std() > 0, key


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20", "resnetpp20", "wrn-16-2"])
def test_vmap_copy_and_pickle(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, input_shape=(1, 16, 16), num_classes=3).eval()
    x = torch.randn(2, 1, 16, 16)
    draws = {key: torch.stack([p, 1.1 * p]) for key, p in model.named_parameters()}
    batched = vmap(lambda weights: functional_call(model, weights, (x,)))(draws)
    for index in range(2):
        one = functional_call(model, {key: draw[index] for key, draw in draws.items()}, (x,))
        torch.testing.assert_close(batched[index], one)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize(
    "name", ["lenet5", "alexnet", "vgg11", "resnet18", "resnet20", "resnetpp20", "wrn-16-2"]
)
def test_backward_hooks_work_on_every_layer(name: str) -> None:
    # An activation that works in place would raise here.
    model = build_model(name, input_shape=(3, 16, 16), num_classes=3)
    for module in model.modules():
        module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model(torch.randn(2, 3, 16, 16, requires_grad=True)).sum().backward()


def test_mlp_takes_any_shape_and_any_widths() -> None:
    assert mlp(2, 2, hidden=(50, 20))(torch.randn(5, 2)).shape == (5, 2)
    assert mlp(64)(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    linear = mlp(3, 1, hidden=())
    x = torch.randn(5, 3)
    weight, bias = linear.parameters()
    torch.testing.assert_close(linear(x), x @ weight.T + bias)


def norm(x: Tensor, layer: nn.Module) -> Tensor:
    """Batch norm in eval mode, written out."""
    assert isinstance(layer, nn.BatchNorm2d)
    mean, var = layer.running_mean, layer.running_var
    assert mean is not None
    assert var is not None

    def channel(v: Tensor) -> Tensor:
        return v.view(1, -1, 1, 1)

    scaled = (x - channel(mean)) / channel(var + layer.eps).sqrt()
    return scaled * channel(layer.weight) + channel(layer.bias)


def randomised(block: nn.Module) -> nn.Module:
    """Give batch norm statistics and parameters that a mistake would show."""
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean):
                assert tensor is not None
                tensor.normal_()
            assert module.running_var is not None
            module.running_var.uniform_(0.5, 2)
    return block.double().eval()


def conv3(x: Tensor, layer: nn.Conv2d, stride: int = 1) -> Tensor:
    return F.conv2d(x, layer.weight, None, stride, padding=1)


def test_wide_block_shares_the_first_activation_with_the_projection() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9).double()
    for block, stride in ((WideBlock(4, 6, 2), 2), (WideBlock(4, 4, 1), 1)):
        randomised(block)
        active = norm(x, block.bn1).clamp(min=0)
        inner = norm(conv3(active, block.conv1, stride), block.bn2).clamp(min=0)
        shortcut = x
        if block.shortcut is not None:
            shortcut = torch.einsum(
                "oi,bihw->bohw", block.shortcut.weight[:, :, 0, 0], active[:, :, ::2, ::2]
            )
        torch.testing.assert_close(block(x), shortcut + conv3(inner, block.conv2))


def test_cifar_block_pads_its_shortcut_with_zero_channels() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9).double()
    block = CifarBlock(4, 8, 2, batch_norm=True)
    randomised(block)
    branch = norm(conv3(x, block.conv1, 2), block.bn1).clamp(min=0)
    branch = norm(conv3(branch, block.conv2), block.bn2)
    shortcut = torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 4, 5, 5).double()], dim=1)
    torch.testing.assert_close(block(x), (branch + shortcut).clamp(min=0))


def test_pyramid_block_has_one_relu_three_norms_and_a_pooled_shortcut() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8).double()
    block = PyramidBlock(4, 5, 2)
    randomised(block)
    branch = norm(conv3(norm(x, block.bn1), block.conv1, 2), block.bn2).clamp(min=0)
    branch = norm(conv3(branch, block.conv2), block.bn3)
    pooled = x.view(2, 4, 4, 2, 4, 2).mean(dim=(3, 5))
    shortcut = torch.cat([pooled, torch.zeros(2, 1, 4, 4).double()], dim=1)
    torch.testing.assert_close(block(x), branch + shortcut)


def test_convolutions_start_from_the_fan_out_distribution() -> None:
    torch.manual_seed(0)
    for model in (resnet18(), wide_resnet(16, 4), vgg11()):
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
                fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
                n = module.weight.numel()
                ratio = module.weight.var().item() * fan_out / 2
                assert abs(ratio - 1) < 5 * (2 / n) ** 0.5  # a sample variance has sd √(2/n)


def test_without_norm_the_last_convolution_of_a_block_starts_smaller() -> None:
    torch.manual_seed(0)
    block = resnet20(width=64, batch_norm=False).get_submodule("layer3.1")
    assert isinstance(block, CifarBlock)
    n, fan_out = block.conv2.weight.numel(), 256 * 9
    for layer, factor in ((block.conv1, 1.0), (block.conv2, 1 / 9)):  # 9 blocks
        ratio = layer.weight.var().item() * fan_out / 2 / factor
        assert abs(ratio - 1) < 5 * (2 / n) ** 0.5


def test_zero_init_residual_makes_every_block_its_shortcut() -> None:
    torch.manual_seed(0)
    for build in (resnet18, resnet50):
        block = build(zero_init_residual=True).get_submodule("layer1.1").eval()
        x = torch.randn(2, 64 if build is resnet18 else 256, 5, 5)
        torch.testing.assert_close(block(x), x.clamp(min=0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lenet5(image_size=15), "at least 16×16 pixels, got image_size=\\(15, 15\\)"),
        (lambda: lenet5(image_size=(28,)), "one number or \\(height, width\\)"),  # type: ignore[arg-type]
        (lambda: lenet5()(torch.zeros(2, 3, 28, 28)), "takes images of \\(32, 32\\) pixels"),
        (lambda: lenet5()(torch.zeros(2, 1, 32, 32)), "\\(batch, 3, height, width\\), got"),
        (lambda: vgg11()(torch.zeros(3, 32, 32)), "\\(batch, 3, height, width\\), got"),
        (lambda: mlp(4)(torch.zeros(4)), "4 values each, got shape \\(4,\\)"),
        (lambda: mlp(4)(torch.zeros(2, 5)), "4 values each, got shape \\(2, 5\\)"),
        (lambda: mlp(4, hidden=(3, 0)), "every width in hidden must be .* got 0"),
        (lambda: mlp(4, hidden=50), "hidden must be a sequence"),  # type: ignore[arg-type]
        (lambda: mlp(0), "in_features must be an integer of at least 1, got 0"),
        (lambda: resnet20(num_classes=-1), "num_classes must be .* got -1"),
        (lambda: resnet20(width=0), "width must be .* got 0"),
        (lambda: resnet18(stem="mnist"), "stem must be"),  # type: ignore[arg-type]
        (lambda: wide_resnet(20, 4), "6·n \\+ 4 \\(10, 16, 22, 28, …\\), got 20"),
        (lambda: wide_resnet(4, 4), "6·n \\+ 4"),
    ],
)
def test_bad_input_gives_one_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert not str(error.value).endswith(".")
