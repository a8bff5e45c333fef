"""Batches: tensors alone, or in tuples and dicts, with or without targets; their loss is a mean.

Training, prediction and batch-norm recalibration all split batches here, so all of them accept the same
loaders. What a loss weighs is read off its graph: 1 for a mean over a batch, 1/4 for one that was divided by
4. Gradients add up over the backward passes of a step, so together its losses must be one mean loss.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchbayes.core.device import PINNED

__all__ = [
    "Inputs",
    "LossWatch",
    "LossWeight",
    "LossWeights",
    "arguments",
    "as_labels",
    "batch_len",
    "batch_weights",
    "call",
    "check_mean_loss",
    "device_of",
    "is_plain_backward",
    "loss_weight",
    "network_dtype",
    "sent",
    "slice_batch",
    "split_batch",
    "suited",
    "to_device",
    "uncompiled",
    "untraced",
]

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]

_TARGET_KEYS = ("target", "targets", "label", "labels", "y")

_SMALL = {torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}

_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_UNCHANGED = ("NegBackward", "ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward",
              "SqueezeBackward", "UnsqueezeBackward", "ReshapeAliasBackward")  # fmt: skip
_DEPTH = 16


def split_batch(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Split a batch into the model's inputs and the targets.

    Args:
        batch: A tensor (inputs only), a tuple or list `(inputs,)`, `(inputs, targets)` or `(inputs, targets,
            weights)`, or a dict whose targets are under `target`, `targets`, `label`, `labels` or `y`.

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
        if len(batch) == 2 or batch_weights(batch) is not None:
            return batch[0], batch[1]
        raise ValueError(
            f"a batch is (inputs,), (inputs, targets) or (inputs, targets, weights), but this one has "
            f"{len(batch)} entries: put several inputs into one tuple or dict, as in ((x1, x2), targets)"
        )
    raise TypeError(
        f"a batch is a tensor, a tuple, a list or a dict, not {type(batch).__name__}: "
        "convert it in the loader's collate function"
    )


def batch_weights(batch: Any) -> Tensor | None:
    """Return the weights of a batch's examples: the third entry, a vector of real numbers, or None.

    Example:
        >>> batch_weights((torch.zeros(2, 3), torch.arange(2), torch.tensor([1.0, 0.5])))
        tensor([1.0000, 0.5000])
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 3:
        return None
    weights = batch[2]
    real = isinstance(weights, Tensor) and weights.is_floating_point() and weights.dim() == 1
    return weights if real else None


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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, without waiting for its copy if the device allows that.

    Example:
        >>> sent(torch.ones(1), torch.device("cpu"))
        tensor([1.])
    """
    if tensor.device.type != "cpu" or device.type not in PINNED:
        return tensor.to(device)
    # torch keeps pinned memory until the copy has been made.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(inputs: Any, device: torch.device | str) -> Any:
    """Move every tensor of `inputs` to `device`; other values are kept."""
    return map_tensors(inputs, lambda tensor: tensor.to(device))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's weights."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def network_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point type of a network's weights."""
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def suited(inputs: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Move inputs to a network's device, and between float32 and float64 if its weights are the other.

    NumPy's numbers are float64 by default, networks float32. No other type is converted: integers may be
    indices, and a network in half precision may want full precision where it takes its inputs.
    """

    def move(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float64:
            return tensor.to(device, dtype)
        if dtype is torch.float64 and tensor.dtype is torch.float32:
            return tensor.to(device, dtype)
        return tensor.to(device)

    return map_tensors(inputs, move)


def as_labels(targets: Tensor) -> Tensor:
    """Return booleans and small integers as int64, which losses take, and other targets as they are."""
    return targets.long() if targets.dtype in _SMALL else targets


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
    return map_leaves(inputs, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(inputs: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to everything in tuples, lists and dicts, however nested."""
    if isinstance(inputs, Mapping):
        return {key: map_leaves(value, function) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map_leaves(value, function) for value in inputs)
    if isinstance(inputs, list):
        return [map_leaves(value, function) for value in inputs]
    return function(inputs)


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
    if factor is None or factor.numel() != 1 or factor.device.type != "cpu":
        return node  # reading it would wait for the device
    # .item() of a number that was no tensor fails inside a dispatch mode, such as a counter of operations.
    return node.next_functions[0][0] if factor.tolist() >= 1 else node


class LossWeight(NamedTuple):
    """The weight of a loss in units of a batch's mean loss.

    Attributes:
        least: At least this; factors above 1 are not counted, because a `GradScaler`'s is one.
        nominal: The product of all factors, to compare losses with one another.
    """

    least: float
    nominal: float


def loss_weight(loss: Tensor, examples: int | None = None) -> LossWeight | None:
    """Return the weight of a loss as its graph shows it, or None if it does not.

    Of several terms the heaviest counts.

    Args:
        loss: The loss.
        examples: Number of examples in the batch, if known. A sum over more targets than these, such as the
            tokens or pixels of every example, does not tell.

    Example:
        >>> import torch
        >>> mean = torch.nn.functional.mse_loss(torch.ones(8, requires_grad=True), torch.zeros(8))
        >>> loss_weight(mean / 4), loss_weight(1024 * (mean / 4 + mean / 8)).least
        (LossWeight(least=0.25, nominal=0.25), 0.25)
    """
    return None if loss.grad_fn is None else _weight(loss.grad_fn, _DEPTH, examples)


def _weight(node: Any, depth: int, examples: int | None) -> LossWeight | None:
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
            terms = [
                _weight(n, depth - 1, examples) for n, _ in node.next_functions if n is not None
            ]
            known = [term for term in terms if term is not None]
            return LossWeight(least * max(known)[0], nominal * max(known)[1]) if known else None
        else:
            items = _items(node, examples)
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
        other = other.tolist()  # as above
    if not isinstance(other, (int, float)) or other == 0 or (divides and place == 1):
        return None, None
    if sum(n is not None for n, _ in functions) > 1:  # a factor with a gradient of its own
        return None, None
    return abs(1 / other if divides else other), functions[place][0]


def _items(node: Any, examples: int | None) -> float | None:
    """Return the weight of a torch loss function: 1 for a mean, the number of its examples for a sum."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _MEAN:
        return 1.0
    total = getattr(node, "_saved_total_weight", None) if reduction == _SUM else None
    if not isinstance(total, Tensor) or total.device.type != "cpu":
        return None
    weighted = getattr(node, "_saved_weight", None) is not None  # by classes
    return None if weighted or float(total) > (examples or math.inf) else float(total)


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
        weight = loss_weight(loss, examples)
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
                "as in torch, so divide each piece's loss by the number of pieces (Trainer of transformers "
                "does so with trainer.model_accepts_loss_kwargs = False); terms of one loss are added before "
                "a single backward()"
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


def is_plain_backward(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function is `loss.backward()`, of the whole loss and for all weights."""
    return (
        func is Tensor.backward and kwargs.get("gradient") is None and kwargs.get("inputs") is None
    )


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
        kwargs = {} if kwargs is None else kwargs
        if is_plain_backward(func, kwargs):
            self.saw(args[0])
        return func(*args, **kwargs)


class _Eager:
    """Keeps the compiler's stance, one for the whole process, at "eager" while any thread wants it."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._stance.__exit__(None, None, None)

    def restart(self) -> None:
        """Forget the other threads, which do not survive a fork."""
        if self._count:
            self._stance.__exit__(None, None, None)
        self._lock, self._count = threading.Lock(), 0


_eager = _Eager()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_eager.restart)


def uncompiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` has compiled without its compiled code inside the block.

    The compiler can neither see who watches the layers of a network nor keep up with weights that are
    replaced at every call: it would compile the network again for each of them.
    """
    # Without Dynamo nothing can have been compiled, and importing it takes long.
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return _eager


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Let a function run as it is written when `torch.compile` meets it, which then compiles what is around.

    Not by `torch.compiler.disable` alone, which imports the compiler for everybody.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, run)
