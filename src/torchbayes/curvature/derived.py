"""Tensors computed from weights alone, such as a normalised weight, and gradients back through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Derived", "quiet_vmap", "substitute"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute v·g/‖v‖ by simple operations: torch's fused kernel cannot be vmapped."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_INSTEAD: dict[Any, Callable[..., Any]] = {torch._weight_norm: _weight_norm}


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Silence vmap's warning that an operation without a batching rule is slow: it is still correct."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def substitute(arguments: Any, values: Mapping[int, Tensor]) -> Any:
    """Replace some tensors, given by id, in nested arguments."""
    leaves, spec = tree_flatten(arguments)
    return tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], spec)


@dataclass
class Derived:
    """A tensor computed from weights and constants.

    Attributes:
        tensor: The tensor.
        func: The torch function that computed it.
        args: The function's arguments.
        kwargs: The function's keyword arguments.
        place: Index of the tensor among the function's outputs.
        targets: Arguments that are weights or derived themselves.
        parents: The derived ones among the targets, by id.
    """

    tensor: Tensor
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int
    targets: list[Tensor]
    parents: dict[int, Derived]

    def __post_init__(self) -> None:
        found: dict[int, Tensor] = {}
        for target in self.targets:
            parent = self.parents.get(id(target))
            found |= {id(root): root for root in ([target] if parent is None else parent.roots)}
        self.roots: list[Tensor] = list(found.values())

    def again(self, values: dict[int, Tensor]) -> Tensor:
        """Recompute the tensor from other values of the weights, given by id."""
        if id(self.tensor) not in values:
            for key, parent in self.parents.items():
                values[key] = parent.again(values)
            args, kwargs = substitute((self.args, self.kwargs), values)
            outputs = _INSTEAD.get(self.func, self.func)(*args, **kwargs)
            values[id(self.tensor)] = tree_leaves(outputs)[self.place]
        return values[id(self.tensor)]

    def pullback(self, name: str) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return a function from gradients of the tensor, one per example, to those of its weights.

        Args:
            name: Description of the tensor, for the `ValueError` if it cannot be computed again.
        """

        def recompute(*weights: Tensor) -> Tensor:
            return self.again({id(r): w for r, w in zip(self.roots, weights, strict=True)})

        value, pull = torch.func.vjp(  # type: ignore[misc]
            recompute, *[r.detach() for r in self.roots]
        )
        if not torch.allclose(value, self.tensor, rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"{name} is transformed at random before it is used (dropout on weights?): torchbayes cannot "
                "take its per-example gradients, so drop activations instead"
            )

        def batched(gradients: Tensor) -> list[tuple[Tensor, Tensor]]:
            with quiet_vmap():
                pieces = torch.func.vmap(pull)(gradients.to(value.dtype))
            return list(zip(self.roots, pieces, strict=True))

        return batched
