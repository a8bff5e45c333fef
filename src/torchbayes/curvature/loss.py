"""Is the loss a mean over the batch, as every method here expects?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["check_mean_loss"]

_SUM = 2
"""torch's number for reduction="sum"."""


def _through_scaling(node: Any) -> Any:
    """The node below a multiplication by a number of at least 1: a `GradScaler`'s, not a division."""
    if node.name() != "MulBackward0":
        return node
    try:
        factor = node._saved_other
    except RuntimeError:  # freed by the backward pass
        return node
    if factor is None or factor.numel() != 1 or not bool(factor >= 1):
        return node
    return node.next_functions[0][0]


def check_mean_loss(loss: Tensor, examples: int) -> None:
    """Raise a `ValueError` if `loss` is plainly the sum over a batch.

    It looks at the last operation only: a sum that is divided afterwards is a mean.

    Args:
        loss: The loss, with its graph.
        examples: The size of the batch.
    """
    node: Any = loss.grad_fn
    if node is None or examples < 2:
        return
    node = _through_scaling(node)
    if node is None:
        return
    summed = getattr(node, "_saved_reduction", None) == _SUM
    if node.name().startswith("SumBackward"):
        sizes = node._saved_self_sym_sizes
        summed = len(sizes) > 0 and int(sizes[0]) == examples
    if summed:
        raise ValueError(
            f"the loss is the sum over the {examples} examples of the batch: give their mean, as with "
            'reduction="mean", because the library multiplies by train_size itself'
        )
