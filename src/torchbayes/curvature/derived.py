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

__all__ = ["Derived", "quiet_vmap", "random_transform", "substitute"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v·g/‖v‖ of simple operations: torch's fused kernel cannot be vmapped."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_INSTEAD: dict[Any, Callable[..., Any]] = {torch._weight_norm: _weight_norm}


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Silence vmap's remark that an operation without a batching rule is slow: it is right all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def substitute(arguments: Any, values: Mapping[int, Tensor]) -> Any:
    """A nest of arguments with some of its tensors, named by their id, replaced."""
    leaves, spec = tree_flatten(arguments)
    return tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], spec)


def random_transform(name: str) -> str:
    """What to say of a transform that gives something else when it is run again."""
    return (
        f"{name} is transformed at random before it is used (dropout on weights?): torchbayes cannot take "
        "its per-example gradients, so drop activations instead"
    )


@dataclass
class Derived:
    """A tensor computed from weights and constants.

    Attributes:
        tensor: The tensor.
        func: The torch function that made it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        place: Which of the function's outputs it is.
        targets: The arguments that are weights or derived themselves.
        parents: The derived ones of them, by id.
    """

    tensor: Tensor
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int
    targets: list[Tensor]
    parents: dict[int, Derived]

    def __post_init__(self) -> None:
        self.roots: list[Tensor] = []
        found: dict[int, Tensor] = {}
        for target in self.targets:
            parent = self.parents.get(id(target))
            for root in [target] if parent is None else parent.roots:
                found[id(root)] = root
        self.roots = list(found.values())

    def again(self, values: dict[int, Tensor]) -> Tensor:
        """Compute the tensor anew from other values of the weights, given by id."""
        if id(self.tensor) not in values:
            for key, parent in self.parents.items():
                values[key] = parent.again(values)
            args, kwargs = substitute((self.args, self.kwargs), values)
            outputs = _INSTEAD.get(self.func, self.func)(*args, **kwargs)
            values[id(self.tensor)] = tree_leaves(outputs)[self.place]
        return values[id(self.tensor)]

    def pullback(self, refusal: str) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
        """A function from gradients of the tensor, one per example, to those of its weights.

        Args:
            refusal: The message of the `ValueError` if the tensor cannot be computed again.
        """

        def recompute(*weights: Tensor) -> Tensor:
            return self.again({id(r): w for r, w in zip(self.roots, weights, strict=True)})

        value, pull = torch.func.vjp(  # type: ignore[misc]
            recompute, *[r.detach() for r in self.roots]
        )
        if not torch.allclose(value, self.tensor, rtol=1e-3, atol=1e-6):
            raise ValueError(refusal)

        def batched(gradients: Tensor) -> list[tuple[Tensor, Tensor]]:
            with quiet_vmap():
                pieces = torch.func.vmap(pull)(gradients.to(value.dtype))
            return list(zip(self.roots, pieces, strict=True))

        return batched
