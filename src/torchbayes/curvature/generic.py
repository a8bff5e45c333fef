"""The rule for functions without a rule of their own: differentiate the function example by example.

The function is run once more under `vmap(vjp)`, on one example at a time as a batch of one, so that a
function that names its dimensions refers to the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchbayes.curvature.accumulate import Record, VectorRecord, wide
from torchbayes.curvature.derived import quiet_vmap, substitute

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["broadcasts_examples", "generic", "is_in_place", "record_broadcast"]

_EXPANSIONS = {
    Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to, Tensor.broadcast_to,
}  # fmt: skip


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument, by torch's naming convention."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__", "__index__")
    )


class _GenericRecord(Record):
    def __init__(
        self, target: Tensor, run: Callable[[dict[int, Tensor]], Tensor], data: Sequence[Tensor],
        gradient: Tensor, dimension: int,
    ) -> None:  # fmt: skip
        super().__init__(target, gradient.shape[dimension])
        self.run, self.data, self.gradient, self.dimension = run, data, gradient, dimension

    def per_example(self, start: int, stop: int) -> Tensor:
        keys = [id(t) for t in self.data]

        def chunk(tensor: Tensor) -> Tensor:
            place = self.dimension
            return tensor.detach().movedim(place, 0)[start:stop].unsqueeze(place + 1)

        def one(gradient: Tensor, *data: Tensor) -> Tensor:
            known = dict(zip(keys, data, strict=True))

            def of_weight(weight: Tensor) -> Tensor:
                return self.run({**known, id(self.target): weight})

            _, pull = torch.func.vjp(of_weight, self.target.detach())  # type: ignore[misc]
            return pull(gradient)[0]  # type: ignore[no-any-return]

        with quiet_vmap():
            result = torch.func.vmap(one)(chunk(self.gradient), *[chunk(t) for t in self.data])
        # A copy: of x + w, say, the weight's gradient is the output's, which autograd still needs.
        return wide(result).clone()


def generic(
    capture: Capture, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    data: Sequence[Tensor], targets: Sequence[Tensor], outputs: Any,
) -> None:  # fmt: skip
    """Note the use of weights by a function that has been run, so that it can be run again per example.

    Args:
        capture: The capture.
        func: The function.
        args: The function's arguments.
        kwargs: The function's keyword arguments.
        data: Tensors among the arguments that have an entry per example.
        targets: Tensors among the arguments that are weights or derived.
        outputs: The function's outputs.
    """
    dimension = capture.tracker.layout[0]
    examples = data[0].shape[dimension]
    for place, output in enumerate(tree_leaves(outputs)):
        if not isinstance(output, Tensor) or not output.requires_grad:
            continue
        if output.dim() <= dimension or output.shape[dimension] != examples:
            raise ValueError(
                f"{capture.tracker.describe(targets[0])} is used by {func.__name__!r}, which returns a "
                f"tensor of shape {tuple(output.shape)} without a dimension of {examples} examples: "
                "torchbayes needs the examples kept apart until the loss, so reduce over them only there"
            )

        def run(values: dict[int, Tensor], place: int = place) -> Tensor:
            new_args, new_kwargs = substitute((args, kwargs), values)
            return tree_leaves(func(*new_args, **new_kwargs))[place]  # type: ignore[no-any-return]

        for target in targets:
            _hook(capture, target, output, run, data, dimension, func.__name__)


def _hook(
    capture: Capture, target: Tensor, output: Tensor, run: Callable[[dict[int, Tensor]], Tensor],
    data: Sequence[Tensor], dimension: int, name: str,
) -> None:  # fmt: skip
    record = _GenericRecord(target, run, data, output.detach(), dimension)
    # Try one example now: an error in the forward pass is clearer than one at the end of the backward pass.
    tried = (name, id(target))
    try:
        if tried not in capture.tried:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                record.per_example(0, 1)
            capture.tried.add(tried)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"{capture.tracker.describe(target)} is used by {name!r} in a way that torchbayes cannot "
            f"differentiate example by example ({str(error).splitlines()[0]}): use a layer of torch.nn for it"
        ) from error

    capture.watch(output, target, lambda g: _GenericRecord(target, run, data, g, dimension))


def broadcasts_examples(
    func: Callable[..., Any], target: Tensor, output: Tensor, dimension: int, examples: int | None
) -> bool:
    """Whether a weight was expanded to one copy per example, as with a class token."""
    if func not in _EXPANSIONS or examples is None or output.dim() <= dimension:
        return False
    own = target.dim() - output.dim() + dimension
    return output.shape[dimension] == examples and (own < 0 or target.shape[own] == 1)


def record_broadcast(capture: Capture, target: Tensor, output: Tensor, dimension: int) -> None:
    """Note a weight that was expanded over the examples: its copies' gradients are those of the examples."""

    def record(gradient: Tensor) -> Record:
        rows = wide(gradient).movedim(dimension, 0).unsqueeze(dimension + 1)
        return VectorRecord(
            target, torch.func.vmap(lambda row: row.sum_to_size(target.shape))(rows)
        )

    capture.watch(output, target, record)
