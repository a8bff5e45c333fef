"""Batches: tensors alone, or in tuples and dicts, with or without targets; their loss is a mean.

Training, prediction and batch-norm recalibration all split batches here, so all of them accept the same
loaders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "Inputs",
    "arguments",
    "batch_len",
    "call",
    "check_mean_loss",
    "slice_batch",
    "split_batch",
    "to_device",
    "uncompiled",
]

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]

_TARGET_KEYS = ("target", "targets", "label", "labels", "y")

_SUM = 2
"""torch's number for reduction="sum"."""


def split_batch(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Split a batch into the model's inputs and the targets.

    Args:
        batch: A tensor (inputs only), a tuple or list `(inputs,)` or `(inputs, targets)`, or a dict
            whose targets are under `target`, `targets`, `label`, `labels` or `y`.

    Returns:
        The inputs, and the targets or None if the batch has none.

    Example:
        >>> inputs, targets = split_batch({"x": torch.zeros(3, 2), "y": torch.arange(3)})
        >>> list(inputs), targets
        (['x'], tensor([0, 1, 2]))
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        keys = [key for key in _TARGET_KEYS if key in batch]
        if len(keys) > 1:
            raise ValueError(
                f"the batch has targets under both {keys[0]!r} and {keys[1]!r}: keep one of them"
            )
        rest = {key: value for key, value in batch.items() if key not in keys}
        return rest, batch[keys[0]] if keys else None
    if isinstance(batch, (tuple, list)):
        if len(batch) == 1:
            return batch[0], None
        if len(batch) == 2:
            return batch[0], batch[1]
        raise ValueError(
            f"a batch is (inputs,) or (inputs, targets), but this one has {len(batch)} entries: "
            "put several inputs into one tuple or dict, as in ((x1, x2), targets)"
        )
    raise TypeError(
        f"a batch is a tensor, a tuple, a list or a dict, not {type(batch).__name__}: "
        "convert it in the loader's collate function"
    )


def call(model: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """Call `model` according to the type of the inputs: `model(x)`, `model(*x)` or `model(**x)`.

    Example:
        >>> call(torch.add, (torch.ones(2), torch.ones(2)))
        tensor([2., 2.])
    """
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `inputs` denote; see `call`."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def to_device(inputs: Any, device: torch.device | str) -> Any:
    """Move every tensor of `inputs` to `device`; other values are kept."""
    return map_tensors(inputs, lambda tensor: tensor.to(device))


def slice_batch(inputs: Any, start: int, stop: int) -> Any:
    """Keep examples `start` to `stop` of every tensor of `inputs`.

    Example:
        >>> slice_batch((torch.arange(5), torch.arange(5)), 1, 3)
        (tensor([1, 2]), tensor([1, 2]))
    """
    return map_tensors(inputs, lambda tensor: tensor[start:stop] if tensor.dim() else tensor)


def batch_len(inputs: Any) -> int:
    """Count the examples of a batch: the length of its first tensor with a dimension.

    Example:
        >>> batch_len({"x": torch.zeros(3, 2)})
        3
    """
    length = next((len(tensor) for tensor in _tensors(inputs) if tensor.dim()), None)
    if length is None:
        raise ValueError(
            f"the inputs ({type(inputs).__name__}) have no tensor with a batch dimension: "
            "the first dimension of a tensor counts the examples"
        )
    return length


def map_tensors(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to each tensor of a tensor, tuple, list or dict, however nested."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(value, function) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map_tensors(value, function) for value in inputs)
    if isinstance(inputs, list):
        return [map_tensors(value, function) for value in inputs]
    return inputs


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(value)


def check_mean_loss(loss: Tensor, examples: int) -> None:
    """Raise a `ValueError` if `loss` is clearly the sum over a batch.

    Only the last operation is inspected: a sum that is divided afterwards is a mean.

    Args:
        loss: The loss, with its graph.
        examples: Size of the batch.
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


def _through_scaling(node: Any) -> Any:
    """Return the node below a multiplication by at least 1, a `GradScaler`'s rather than a division."""
    if node.name() != "MulBackward0":
        return node
    try:
        factor = node._saved_other
    except RuntimeError:  # freed by the backward pass
        return node
    if factor is None or factor.numel() != 1 or not bool(factor >= 1):
        return node
    return node.next_functions[0][0]


def uncompiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` has compiled without its compiled code inside the block.

    The compiler can neither see who watches the layers of a network nor keep up with weights that are
    replaced at every call: it would compile the network again for each of them.
    """
    # Without Dynamo nothing can have been compiled, and importing it takes long.
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
