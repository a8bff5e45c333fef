"""The counter itself, on the CPU: what it counts does not depend on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .synchronisations import counted_synchronisations

WAITING: dict[str, Callable[[Tensor], object]] = {
    "_local_scalar_dense": lambda x: float(x.sum()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: x[x > 0],
    "_linalg_check_errors": lambda x: torch.linalg.inv(torch.eye(2)),
}


@pytest.mark.parametrize("operation", WAITING)
def test_counts_what_waits(operation: str) -> None:
    x = torch.randn(4)
    with counted_synchronisations(on="cpu") as waits:
        WAITING[operation](x)
    assert [wait.operation for wait in waits] == [operation]
    assert "test_synchronisations.py" in waits[0].where
    with counted_synchronisations() as waits:
        WAITING[operation](x)
    assert not waits


def test_counts_a_branch_and_a_backward_pass() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * gradient.sum().item()

    x = torch.ones(2, requires_grad=True)
    with counted_synchronisations(on="cpu") as waits:
        if (x > 0).all():
            Reads.apply(x).sum().backward()
    assert [wait.operation for wait in waits] == ["_local_scalar_dense"] * 2


def test_other_operations_do_not_wait() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with counted_synchronisations(on="cpu") as waits:
        y = torch.relu(x @ x)[torch.tensor([0, 2])].to(torch.float64).masked_fill(x[:2] > 0, 0.0)
        torch.where(y > 0, y, 0).sum().backward()
        torch._foreach_mul_([x.detach()], 2.0)
        x.detach().copy_(torch.zeros(4, 4))
    assert not waits, waits
