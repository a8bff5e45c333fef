"""The fast network: its first layer against SciPy's transform, how it starts, and its two variants."""

import numpy as np
import torch
from scipy.fft import dctn
from torch import nn

from torchbayes.models import fastnet
from torchbayes.models.fastnet import PatchTransform


def test_parameter_count_layer_by_layer() -> None:
    widths = [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)]
    convolutions = sum(9 * i * o for i, o in widths)
    outputs = sum(o for _, o in widths)
    for batch_norm, rest in ((True, 2 * outputs), (False, outputs)):
        model = fastnet(batch_norm=batch_norm)
        assert sum(p.numel() for p in model.parameters()) == convolutions + rest + 257 * 10
        assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) is batch_norm


def test_the_first_layer_is_the_scaled_cosine_transform_of_patches() -> None:
    deviations = np.array(
        [[3.965, 0.729, 0.788, 0.292], [1.102, 0.077, 0.092, 0.018], [0.508, 0.049, 0.055, 0.014]]
    )
    images = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    found = PatchTransform(3)(images)
    assert found.shape == (2, 24, 4, 3)
    patch = images[1, :, 2:4, 1:3].double().numpy()
    expected = dctn(patch, norm="ortho").reshape(3, 4) / np.sqrt(deviations**2 + 0.03**2)
    np.testing.assert_allclose(found[1, :12, 2, 1].numpy(), expected.ravel(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, 12:], -found[:, :12])


def test_the_first_layer_is_frozen_and_in_no_state_dict() -> None:
    model = fastnet(width=8)
    assert not any("patches" in name for name, _ in model.named_parameters())
    assert not any("patches" in name for name in model.state_dict())


def test_convolutions_start_as_copies_of_their_inputs() -> None:
    for batch_norm in (True, False):
        convolution = fastnet(width=32, batch_norm=batch_norm).features[0]
        x = torch.randn(1, 24, 6, 6, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(convolution(x)[:, :24], x)
        # Those beyond start at random, and no two alike.
        assert len(torch.unique(convolution.weight[24:].detach(), dim=0)) == 8
