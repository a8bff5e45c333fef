"""How much a loss weighs, read off its graph: 1 for a mean over a batch, 1/4 for one that was divided by 4.

Gradients add up over the backward passes of a step, as everywhere in torch. Together the losses must be one
mean loss; where the graph shows that they are more than that, the user hears of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchbayes.core.batch import check_mean_loss

__all__ = ["LossWatch", "LossWeight", "LossWeights", "loss_weight"]

_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_UNCHANGED = ("NegBackward", "ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward",
              "SqueezeBackward", "UnsqueezeBackward", "ReshapeAliasBackward")  # fmt: skip
_DEPTH = 16


class LossWeight(NamedTuple):
    """The weight of a loss in units of a batch's mean loss.

    Attributes:
        least: At least this; factors above 1 are not counted, because a `GradScaler`'s is one.
        nominal: The product of all factors, to compare losses with one another.
    """

    least: float
    nominal: float


def loss_weight(loss: Tensor) -> LossWeight | None:
    """Return the weight of a loss as its graph shows it, or None if it does not.

    Of several terms the heaviest counts.

    Example:
        >>> import torch
        >>> mean = torch.nn.functional.mse_loss(torch.ones(8, requires_grad=True), torch.zeros(8))
        >>> loss_weight(mean / 4), loss_weight(1024 * (mean / 4 + mean / 8)).least
        (LossWeight(least=0.25, nominal=0.25), 0.25)
    """
    return None if loss.grad_fn is None else _weight(loss.grad_fn, _DEPTH)


def _weight(node: Any, depth: int) -> LossWeight | None:
    least, nominal, mean = 1.0, 1.0, False
    for _ in range(depth):
        name = node.name()
        if name in ("DivBackward0", "MulBackward0", "MulBackward1"):
            factor, node = _factor(node)
            if factor is None:
                return None
            least, nominal = least * min(factor, 1.0), nominal * factor
        elif name.startswith("MeanBackward"):
            mean, node = True, node.next_functions[0][0]
        elif name.startswith(_UNCHANGED):
            node = node.next_functions[0][0]
        elif mean:
            return LossWeight(least, nominal)
        elif name in ("AddBackward0", "SubBackward0"):
            terms = [_weight(n, depth - 1) for n, _ in node.next_functions if n is not None]
            known = [term for term in terms if term is not None]
            return LossWeight(least * max(known)[0], nominal * max(known)[1]) if known else None
        else:
            items = _items(node)
            return None if items is None else LossWeight(least * items, nominal * items)
        if node is None:
            return LossWeight(least, nominal) if mean else None
    return None


def _factor(node: Any) -> tuple[float | None, Any]:
    """Return by how much a node multiplies, if that can be read without waiting, and what it multiplies."""
    divides, functions = node.name() == "DivBackward0", node.next_functions
    place = next(i for i, (n, _) in enumerate(functions) if n is not None)
    try:
        other = getattr(node, "_saved_other", None) if place == 0 else node._saved_self
    except RuntimeError:  # freed by an earlier backward pass
        return None, None
    if isinstance(other, Tensor):
        if other.numel() != 1 or other.device.type != "cpu":
            return None, None
        other = other.item()
    if not isinstance(other, (int, float)) or other == 0 or (divides and place == 1):
        return None, None
    if sum(n is not None for n, _ in functions) > 1:  # a factor with a gradient of its own
        return None, None
    return abs(1 / other if divides else other), functions[place][0]


def _items(node: Any) -> float | None:
    """Return the weight of a torch loss function: 1 for a mean, the number of its targets for a sum."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _MEAN:
        return 1.0
    total = getattr(node, "_saved_total_weight", None) if reduction == _SUM else None
    return float(total) if isinstance(total, Tensor) and total.device.type == "cpu" else None


class LossWeights:
    """The weights of the losses that are differentiated for one step.

    Attributes:
        calls: Number of calls of the model so far. Losses of the same call are terms of one loss.
        passes: Number of backward passes so far, without further ones of the same call.
        total: Sum of the weights that are known.
        scale: The last factor of the last loss, a `GradScaler`'s if there is one.
    """

    def __init__(self) -> None:
        self.calls, self.passes, self.total = 0, 0, 0.0
        self.scale: Tensor | None = None
        self._differentiated, self._known = 0, True

    def add(self, loss: Tensor, examples: int | None) -> LossWeight | None:
        """Note a loss that is about to be differentiated.

        Args:
            loss: The loss.
            examples: Number of examples in the batch, if known.

        Returns:
            Its weight, if its graph tells.

        Raises:
            ValueError: If it is clearly a sum over the batch, or if all losses of the step weigh too much.
        """
        if examples is not None:
            check_mean_loss(loss, examples)
        self.scale = _last_factor(loss)
        weight = loss_weight(loss)
        if self.calls and self.calls == self._differentiated:
            return weight
        self._differentiated = self.calls
        self.passes += 1
        self.total += 0.0 if weight is None else weight.least
        self._known = self._known and weight is not None
        if self.total > 1.01:
            raise ValueError(
                f"with backward pass {self.passes} of this step its losses weigh {self.total:.3g} in all, "
                "where one mean loss weighs 1: gradients add up over backward passes and sampled() blocks, "
                "as in torch, so divide each piece's loss by the number of pieces; terms of one loss are "
                "added before a single backward()"
            )
        return weight

    def check_total(self) -> None:
        """Warn if every loss of the step was clearly divided twice by their number."""
        if self._known and self.passes > 2 and abs(self.total * self.passes - 1) < 0.01:
            warnings.warn(
                f"the losses of this step's {self.passes} backward passes weigh {self.total:.3g} in all, "
                "as if each was divided twice by their number: their gradients add up to that of one mean "
                "loss if each is divided once (accelerate and Trainer divide it themselves)",
                stacklevel=4,
            )


def _last_factor(loss: Tensor) -> Tensor | None:
    """Return the tensor by which a loss was multiplied last, without reading it."""
    node: Any = loss.grad_fn
    if node is None or node.name() != "MulBackward0":
        return None
    try:
        factor = node._saved_other
    except RuntimeError:  # freed by an earlier backward pass
        return None
    return factor if isinstance(factor, Tensor) and factor.numel() == 1 else None


class LossWatch(TorchFunctionMode):
    """Looks at every loss that is differentiated inside `with watch:`, at the cost of a call per function."""

    def __init__(self, saw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.saw = saw

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a torch function; look at the loss of a backward pass first."""
        if func is Tensor.backward:
            self.saw(args[0])
        return func(*args, **(kwargs or {}))
