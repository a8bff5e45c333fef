"""Which tensors are weights, which are made of weights alone, which are constants, and which are data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.curvature.derived import Derived

__all__ = ["Tracker"]


class Tracker:
    """What is known of the tensors that a forward pass uses, by their identity.

    Args:
        parameters: The weights, by name.

    Attributes:
        batch: The number of examples that the model was last called with, if it was.
        sequence_batch: The number of examples while attention runs, which has them in dimension 1.
        derived: Tensors computed from weights and constants, by id.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.names = {id(p): name for name, p in parameters.items()}
        self.weights = {id(p): p for p in parameters.values()}
        self.forget()

    def forget(self) -> None:
        """Know the weights only."""
        self.batch: int | None = None
        self.sequence_batch: int | None = None
        self.derived: dict[int, Derived] = {}
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}
        self._constants: dict[int, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        """Start a block of forward passes of `model`."""
        self.forget()
        self._constants = {id(b): b for b in model.buffers()}

    def saw_inputs(self, inputs: Any) -> None:
        """Note what the model is called with."""
        leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        for leaf in leaves:
            self._constants.pop(id(leaf), None)  # data, even if it was made inside the block
        self.batch = next((t.shape[0] for t in leaves if t.dim() > 0), None)

    @property
    def layout(self) -> tuple[int, int | None]:
        """The dimension of the examples and their number."""
        return (0, self.batch) if self.sequence_batch is None else (1, self.sequence_batch)

    def scan(self, values: Iterable[Any]) -> tuple[bool, bool]:
        """Whether there is a weight or derived tensor among the values, and whether all are constants."""
        weights, constant = False, True
        for value in values:
            if isinstance(value, Tensor):
                key = id(value)
                if key in self.weights or key in self.derived or key in self._spread:
                    weights = True
                elif constant and key not in self._constants:
                    constant = False
            elif type(value) in (list, tuple) and value:
                inside = self.scan(value)
                weights, constant = weights or inside[0], constant and inside[1]
        return weights, constant

    def add_constant(self, tensor: Tensor) -> None:
        """Note a tensor that was computed without data, such as the result of `torch.arange`."""
        self._constants[id(tensor)] = tensor

    def add_derived(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        targets: list[Tensor], outputs: Any,
    ) -> None:  # fmt: skip
        """Note what a function made of weights and constants."""
        parents = {id(t): self.derived[id(t)] for t in targets if id(t) in self.derived}
        for place, leaf in enumerate(tree_leaves(outputs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.derived[id(leaf)] = Derived(leaf, func, args, kwargs, place, targets, parents)

    def add_spread(self, output: Tensor, target: Tensor) -> None:
        """Note a weight that was expanded to one copy per example: from here on it is data."""
        self._spread[id(output)] = (output, target)

    def target(self, tensor: Any) -> Tensor | None:
        """The tensor, if it is a weight or derived and wants a gradient."""
        if not isinstance(tensor, Tensor):
            return None
        key = id(tensor)
        if key in self._spread:
            raise ValueError(
                f"{self.describe(self._spread[key][1])} was expanded to the number of examples and then used "
                "as the weight of a layer: torchbayes cannot tell its rows from examples, so expand it to "
                "another size or choose another batch size"
            )
        known = key in self.weights or key in self.derived
        return tensor if known and tensor.requires_grad else None

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor has nothing to do with the examples."""
        key = id(tensor)
        if key in self.weights or key in self.derived:
            return True
        # A constant with a row per example, such as an initial state of zeros, is as good as data.
        rows = tensor.dim() > 1 and tensor.shape[0] == self.batch
        return key in self._constants and not rows

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a tensor has an entry per example, as far as one can tell from its shape."""
        if self.is_constant(tensor):
            return False
        dimension, examples = self.layout
        if examples is None:
            return tensor.dim() > 0
        return tensor.dim() > dimension and tensor.shape[dimension] == examples

    def check_examples(self, rows: int, target: Tensor) -> None:
        """Raise a `ValueError` if a layer gets another number of rows than the model got examples."""
        if self.batch is not None and rows != self.batch:
            raise ValueError(
                f"{self.describe(target)} gets {rows} rows but the model was given {self.batch} examples: "
                "per-example gradients need the examples in dimension 0 of every layer's input (for a "
                "sequence model batch_first=True; do not fold other dimensions into the batch)"
            )

    def roots(self, target: Tensor) -> list[Tensor]:
        """The weights that a tensor is made of: itself, or a derived tensor's."""
        derived = self.derived.get(id(target))
        return [target] if derived is None else derived.roots

    def describe(self, target: Tensor) -> str:
        """A weight's name, for messages; of a derived tensor, that of the first weight it is made of."""
        return f"weight {self.names[id(self.roots(target)[0])]!r}"
