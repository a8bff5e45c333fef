"""Per-example statistics of gradients, gathered while an ordinary backward pass runs.

A `Capture` watches the torch functions that a model calls. Where a weight meets data, a rule for that
function (see `rules`) notes the input and, on the way back, the gradient of the output; from the two
follow the gradients of single examples. Because functions are watched, not modules, it makes no
difference whether a weight is used by a layer, by `F.linear` in someone's own module, or several times.

Three kinds of tensors are told apart: *weights*; *derived* tensors, computed from weights (and buffers)
alone, such as the weight of a weight-normalised layer; and data. A gradient of a derived tensor is pulled
back to its weights, example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchbayes.curvature.accumulate import Use, Uses
from torchbayes.curvature.composite import opened
from torchbayes.curvature.factors import FactorSums
from torchbayes.curvature.generic import broadcasts_examples, generic, is_in_place, record_broadcast
from torchbayes.curvature.gradient_marks import has_new_gradient, mark_gradients
from torchbayes.curvature.loss import check_mean_loss
from torchbayes.curvature.rules import RULES
from torchbayes.curvature.tracking import Tracker

__all__ = ["Capture"]

# Asked of weights all the time, and no more than questions.
_PLAIN = {
    *(
        getattr(Tensor, name).__get__
        for name in ("grad", "shape", "device", "dtype", "requires_grad")
    ),
    getattr(Tensor, "grad").__set__,  # noqa: B009
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_ATTENTION = torch.nn.functional.multi_head_attention_forward


class Capture(TorchFunctionMode):
    """Sums over examples of squared gradients, for a model's weights.

    Inside `with capture.block():` run forward and backward passes as usual; ordinary gradients arrive in
    `.grad` as ever. Afterwards `squares(p)` is the mean over examples of the squared gradient of one
    example's loss. All backward passes of a block together are taken to be of one mean loss, so
    micro-batches weighted by their share of the batch are exact.

    Args:
        model: The network; the first dimension of its first input counts the examples.
        parameters: The weights to watch, by name.
        factors: The names of weights of linear and convolution layers for which to gather Kronecker
            factors instead of squares, each with the name of the bias that goes with it, if any.

    Example:
        >>> import torch
        >>> from torchbayes.curvature import Capture
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> capture = Capture(net, dict(net.named_parameters()))
        >>> with capture.block():
        ...     net(torch.tensor([[1.0], [3.0]])).mean().backward()
        >>> net.weight.grad.item(), capture.squares(net.weight).item()   # (1 + 3)/2, (1 + 9)/2
        (2.0, 5.0)
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        factors: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(
                f"{type(model).__name__} is a scripted module, into which torchbayes cannot see: pass the "
                "plain module"
            )
        self.model = model
        self.tracker = Tracker(parameters)
        self.uses = Uses(self.tracker)
        self.factors = {
            id(parameters[weight]): FactorSums(
                parameters[weight], None if bias is None else parameters[bias]
            )
            for weight, bias in ({} if factors is None else factors).items()
        }
        self.tried: set[tuple[Any, int]] = set()
        """Functions and weights for which the generic rule is known to work."""
        self.unscaled: float | None = None
        """What a `GradScaler` has multiplied the gradients by inside the block, if it has."""

    @contextmanager
    def block(self) -> Iterator[None]:
        """Watch what happens inside; nothing of it is left after an exception."""
        self._clear()
        self.tracker.begin(self.model)
        mark_gradients(self.tracker.weights.values())
        handle = self.model.register_forward_pre_hook(
            lambda _module, args, kwargs: self.tracker.saw_inputs((args, kwargs)), with_kwargs=True
        )
        try:
            with self:
                yield
            self._check_seen()
        except BaseException:
            self._clear()
            raise
        finally:
            handle.remove()
            self.tracker.forget()
            self.uses.drop()

    def _clear(self) -> None:
        self.unscaled = None
        self.uses.clear()
        for sums in self.factors.values():
            sums.clear()

    def _check_seen(self) -> None:
        """Raise a `ValueError` if a weight got a gradient in a way that the mode has not seen."""
        for key, p in self.tracker.weights.items():
            if key not in self.uses.seen and p.requires_grad and has_new_gradient(p):
                raise ValueError(
                    f"{self.tracker.describe(p)} has a gradient but torchbayes did not see where it was "
                    "used: call the plain module, neither scripted nor compiled, and checkpoint activations "
                    "with use_reentrant=False"
                )

    # Results.

    @property
    def examples(self) -> int:
        """The examples of all backward passes of the last block."""
        return self.uses.examples

    def squares(self, parameter: Tensor) -> Tensor | None:
        """The mean over examples of squared gradients, a new tensor; None if the weight was not used."""
        total = self.sum_of_squares(parameter)
        return None if total is None else total * self.examples

    def sum_of_squares(self, parameter: Tensor) -> Tensor | None:
        """Σᵢ (∇ℓᵢ / M)², in a buffer that the next block overwrites; None if the weight was not used."""
        return self.uses.total(parameter)

    # The mode.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; where it brings a weight and data together, note both."""
        kwargs = {} if kwargs is None else kwargs
        if func in _PLAIN:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            if self.tracker.batch is not None:
                check_mean_loss(args[0], self.tracker.batch)
            return func(*args, **kwargs)
        if func is _UNSCALE:
            return self._unscale(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        weights, constant = self.tracker.scan((*args, *kwargs.values()) if kwargs else args)
        if not weights:
            outputs = func(*args, **kwargs)
            if constant and isinstance(outputs, Tensor):
                self.tracker.add_constant(outputs)
            return outputs
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        inside = opened(func)
        return (
            self.other(func, args, kwargs)
            if inside is None
            else self._open(func, inside, args, kwargs)
        )

    def _open(
        self, func: Any, inside: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = self.tracker.sequence_batch
        if func is _ATTENTION:
            query = args[0] if args else kwargs["query"]
            self.tracker.sequence_batch = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:
                return inside(*args, **kwargs)
        finally:
            self.tracker.sequence_batch = before

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that no rule knows: on weights alone, or on weights and data."""
        tracker = self.tracker
        outputs = func(*args, **kwargs)
        if not isinstance(outputs, (Tensor, tuple, list)):
            return outputs
        found = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [t for t in tensors if id(t) in tracker.weights or id(t) in tracker.derived]
        targets = [t for t in known if t.requires_grad]
        if not found or not targets:
            return outputs
        data = [t for t in tensors if tracker.is_data(t)]
        if data:
            if is_in_place(func):
                raise ValueError(
                    f"{tracker.describe(targets[0])} is used by the in-place function {func.__name__!r}: "
                    "write it out of place, as in x = x * w, so that torchbayes can see both its inputs"
                )
            generic(self, func, args, kwargs, data, targets, outputs)
            return outputs
        dimension, examples = tracker.layout
        if broadcasts_examples(func, targets[0], found[0], dimension, examples):
            record_broadcast(self, targets[0], found[0], dimension)
            tracker.add_spread(found[0], targets[0])
            return outputs
        self.uses.seen.update(id(root) for t in targets for root in tracker.roots(t))
        tracker.add_derived(func, args, kwargs, targets, outputs)
        return outputs

    def use(self, target: Tensor) -> Use:
        """Note a use of a weight in the forward pass."""
        return self.uses.use(target)

    def _unscale(self, gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
        own = {id(p.grad) for p in self.tracker.weights.values() if p.grad is not None}
        if any(id(g) in own for g in gradients):
            self.unscaled = float(inv_scale)
        _UNSCALE(gradients, found_inf, inv_scale)
