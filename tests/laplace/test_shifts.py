"""The products of 3 × 3 patches from shifts, against the patches themselves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import unfold

from torchbayes.core.workspace import Workspace
from torchbayes.laplace.shifts import PRODUCTS, add_products_of_shifts, patch_products


@pytest.mark.parametrize("shape", [(3, 5, 7, 4), (2, 3, 1, 1), (2, 1, 3, 1), (1, 2, 2, 9)])
def test_products_equal_those_of_unfolded_patches(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, *shape, dtype=torch.float64)
    total = torch.zeros(PRODUCTS, shape[1], shape[1], dtype=torch.float64)
    scratch = Workspace()
    for batch in x:  # two, because sums go on
        add_products_of_shifts(batch, total, scratch)
    patches = unfold(x.flatten(0, 1), 3, padding=1)
    expected = torch.einsum("nip,njp->ij", patches, patches)
    torch.testing.assert_close(patch_products(total), expected, rtol=1e-12, atol=1e-12)


def test_other_shapes_and_memory_formats_may_follow() -> None:
    scratch = Workspace()
    total = torch.zeros(PRODUCTS, 3, 3)
    expected = torch.zeros(27, 27)
    for height in (5, 3, 6):
        x = torch.randn(2, 3, height, 4).contiguous(memory_format=torch.channels_last)
        add_products_of_shifts(x, total, scratch)
        patches = unfold(x, 3, padding=1)
        expected += torch.einsum("nip,njp->ij", patches, patches)
    torch.testing.assert_close(patch_products(total), expected, rtol=1e-5, atol=1e-5)
