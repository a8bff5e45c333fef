"""What the optimisers that hold a Gaussian over the weights have in common.

Between steps the model has the mean weights. `sampled()` puts a draw in their place, watches the gradients
inside the block, and puts the mean back whatever happens. One or more blocks make a step: K draws on one
batch, micro-batches with a draw each, and processes with draws of their own are all averaged the same way,
weighted by the examples they saw (Algorithm 1 of the VOGN paper, lines 5 to 16).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core import distributed
from torchbayes.core.batch import check_mean_loss
from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.curvature.capture import Capture, has_new_gradient, mark_gradients
from torchbayes.curvature.products import Scratch
from torchbayes.optim.statistics import Bank, Statistics
from torchbayes.posterior import Posterior, snapshot
from torchbayes.prior import GaussianPrior

__all__ = ["WeightOptimizer", "check_number", "resolve_prior"]


_LARGE = 2**18
"""Entries from which a tensor is updated part by part, so that a part stays in a cache."""


def check_number(
    name: str, value: float, *, low: float = 0.0, above: bool = False, high: float = math.inf
) -> None:
    """Raise a `ValueError` unless low ≤ value ≤ high (low < value if `above`)."""
    if not (value > low if above else value >= low) or not value <= high or math.isnan(value):
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{name} is {value:g}: expected a number {least}{most}")


def resolve_prior(
    prior_precision: float, prior: GaussianPrior | None
) -> tuple[float, GaussianPrior | None]:
    """One precision for all weights if the prior is that simple, else the prior of single weights."""
    check_number("prior_precision", prior_precision)
    if prior is None:
        return prior_precision, None
    if not isinstance(prior, GaussianPrior):
        raise TypeError(
            f"prior is a {type(prior).__name__}: natural-gradient methods need a Gaussian prior, so give "
            "a GaussianPrior or prior_precision"
        )
    if not isinstance(prior.precision, dict) and prior.mean == 0.0:
        return float(prior.precision), None
    return prior_precision, prior


class WeightOptimizer(torch.optim.Optimizer):
    """An optimiser whose state is a distribution over the weights of a model.

    A subclass says how the mean is perturbed and how the statistics of a step update its state.

    Args:
        model: The network.
        params: What to train: parameters of `model` or groups of them; all trainable ones if None.
        defaults: The options of the groups; `train_size` is among them.
        mc_samples: The draws per call of `step(closure)`.
        generator: Where the noise comes from; a new one, seeded from torch's, if None.
        prior: The prior of single weights, if it is not the same for all.
    """

    # GradScaler then hands over its scale instead of unscaling `.grad`: squares need it squared.
    _step_supports_amp_scaling = True
    random = True

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        *,
        mc_samples: int,
        generator: torch.Generator | None,
        prior: GaussianPrior | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes the model first, got {type(model).__name__}: "
                "pass the module itself, not its parameters"
            )
        if mc_samples < 1:
            raise ValueError(f"mc_samples is {mc_samples}: expected at least 1 draw per step")
        train_size = defaults["train_size"]
        if isinstance(train_size, bool) or not isinstance(train_size, int) or train_size < 1:
            raise ValueError(
                f"train_size is {train_size!r}: expected the number of training examples, at least 1"
            )
        self.model, self.mc_samples, self.prior = model, mc_samples, prior
        self._names = {id(p): name for name, p in model.named_parameters()}
        norms = norm_parameters(model)
        self._fixed = {key for key, name in self._names.items() if name in norms}
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._scratch = Scratch()
        self._small: dict[Any, list[Tensor]] = {}
        self._capture: Capture | None = None
        self._bank = Bank()
        self._unbanked = False
        self._inside = False
        self._scaler_seen: float | None = None
        self._local_examples = 0
        self._largest_call = 0
        everything = list(trainable(model).values())
        super().__init__(everything if params is None else params, defaults)
        device = self.param_groups[0]["params"][0].device
        if generator is None:
            seed = int(torch.randint(2**62, ())) + distributed.rank()
            generator = torch.Generator(device).manual_seed(seed)
        self.generator = generator

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more of the model's parameters."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if id(p) not in self._names:
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is not one of {type(self.model).__name__}'s: "
                    "pass parameters of the model that the optimiser was made with"
                )
        self._capture = None

    # What subclasses say.

    watches_examples = False
    """Whether per-example statistics are needed."""

    @abstractmethod
    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters that have a spread to draw from."""

    @abstractmethod
    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        """Fill `draws` with draws of the weights."""

    @abstractmethod
    def _statistics(self) -> Statistics:
        """The means over the last block's examples, as the gradients are scaled now."""

    def _additive(self, statistics: Statistics) -> Statistics:
        """The same in a form that can be averaged over blocks."""
        return statistics

    @abstractmethod
    def _update(self, statistics: Statistics) -> None:
        """Update state and mean."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """What has been learned, as a posterior of the model."""

    # Drawing.

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Put a draw in the place of the mean weights; run forward and backward passes inside.

        Several blocks before a `step()` are averaged, each counting its examples; a block without a backward
        pass does not count. The mean is put back at the end of the block, also after an exception, and then
        the block does not count either.
        """
        if self._inside:
            raise RuntimeError("sampled() is already open: end it before drawing again")
        self._bank_block()
        with torch.no_grad():
            chosen = self._draw() if self.random else []
        means = [p.data for p, _ in chosen]
        self._inside = True
        try:
            for p, draw in chosen:
                p.data = draw
            with self._watching():
                yield
        finally:
            for (p, _), mean in zip(chosen, means, strict=True):
                p.data = mean
                # A backward pass after the block would use the mean where the forward pass used the draw.
                torch.autograd.graph.increment_version(p)
            self._inside = False
        self._unbanked = any(has_new_gradient(p) for p in self._parameters())

    def _draw(self) -> list[tuple[Tensor, Tensor]]:
        groups = [(group, self._perturbable(group)) for group in self.param_groups]
        groups = [(group, [p for p in params if p.requires_grad]) for group, params in groups]
        draws = {id(p): self._buffer("draw", p) for _, params in groups for p in params}
        for group, params in groups:
            if params:
                self._perturb(group, params, [draws[id(p)] for p in params])
        return [(p, draws[id(p)]) for _, params in groups for p in params]

    def _buffer(self, kind: str, like: Tensor) -> Tensor:
        """A kept tensor in the shape of a parameter: fresh large ones cost page faults every step."""
        key = (kind, id(like))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.device != like.device or buffer.dtype != like.dtype:
            self._buffers[key] = buffer = torch.empty_like(like, requires_grad=False)
        return buffer

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._local_examples, self._largest_call, self._scaler_seen = 0, 0, None
        if self.watches_examples:
            if self._capture is None:
                self._capture = self._new_capture()
            with self._capture.block():
                yield
            self._local_examples, self._scaler_seen = self._capture.examples, self._capture.unscaled
            self._largest_call = self._capture.largest_batch
            return
        mark_gradients(self._parameters())
        handle = self.model.register_forward_pre_hook(self._count_examples, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _new_capture(self) -> Capture:
        return Capture(self.model, {self._names[id(p)]: p for p in self._parameters()})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _count_examples(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.dim() > 0:
                self._local_examples += value.shape[0]
                self._largest_call = max(self._largest_call, value.shape[0])
                return

    # Stepping.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the distribution.

        Args:
            closure: Clears the gradients, computes the *mean* loss of a batch and its gradients, and
                returns the loss. It is called once per draw. Without it, `sampled()` must have been used.

        Returns:
            The closure's loss, averaged over the draws.
        """
        loss: Any = None
        if closure is not None:
            self._forget()
            try:
                loss = self._run(closure)
            except BaseException:
                self._forget()
                raise
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            self._forget()
            return loss
        alone = distributed.world_size() == 1  # a process may have no examples of a batch
        if not self._unbanked and self._bank.empty and alone:
            raise RuntimeError(
                "step() has no gradients of a draw: call step(closure), or run the backward pass inside "
                "`with optimizer.sampled():` first"
            )
        unscaled_outside = found_inf is not None and scale is None and self._scaler_seen is None
        if unscaled_outside and self.watches_examples:
            raise ValueError(
                "the gradients were unscaled outside of sampled(): call scaler.unscale_(optimizer) "
                "inside the block, so that squared gradients are unscaled too"
            )
        statistics = self._gathered()
        self._check_train_size()
        if scale is not None:
            statistics.unscale(float(scale))
        self._update(statistics)
        self._forget()
        return loss

    def _run(self, closure: Callable[[], Any]) -> Any:
        total: Any = None
        for _ in range(self.mc_samples):
            with self.sampled(), torch.enable_grad():
                loss = closure()
            if isinstance(loss, Tensor):
                if self._largest_call > 0:
                    check_mean_loss(loss, self._largest_call)
                loss = loss.detach()
            total = loss if total is None else total + loss
        return total if self.mc_samples == 1 or total is None else total / self.mc_samples

    def _check_train_size(self) -> None:
        for group in self.param_groups:
            if self._largest_call > group["train_size"]:
                raise ValueError(
                    f"train_size is {group['train_size']} but a batch has {self._largest_call} examples: "
                    "train_size is the number of examples in the whole training set"
                )

    def _forget(self) -> None:
        self._unbanked = False
        self._bank.clear()

    def _bank_block(self) -> None:
        """Put the statistics of the last block aside, because another one follows."""
        if not self._unbanked:
            return
        with torch.no_grad():
            self._bank.add(self._additive(self._statistics()), float(self._local_examples))
            for p in self._parameters():
                p.grad = None  # it is in the bank now
        self._unbanked = False

    def _gathered(self) -> Statistics:
        """The means over all blocks of all processes."""
        shared = distributed.world_size() > 1
        if self._bank.empty and not shared:
            return self._statistics()
        if self._unbanked:
            self._bank.add(self._additive(self._statistics()), float(self._local_examples))
        if shared:
            self._bank.reduce(self._shapes())
        return self._bank.mean()

    def _shapes(self) -> dict[tuple[str, int], Tensor]:
        """For every statistic a tensor of its shape, in an order that all processes share."""
        kinds = ("gradient", "square") if self.watches_examples else ("gradient", "product")
        return {(kind, id(p)): p for p in self._parameters() if p.requires_grad for kind in kinds}

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state as torch has it, and that of the generator."""
        state = super().state_dict()
        state["generator"] = {"state": self.generator.get_state(), "rank": distributed.rank()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: on the same process bit by bit, on another with draws of its own."""
        super().load_state_dict(state_dict)
        saved = state_dict.get("generator")
        if saved is not None:
            self.generator.set_state(saved["state"].cpu())
            if saved["rank"] != distributed.rank():
                seed = torch.randint(
                    2**62, (), generator=self.generator, device=self.generator.device
                )
                self.generator.manual_seed(int(seed) + distributed.rank())
        self._forget()

    # For subclasses.

    def _prior_of(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The prior's mean and precision of every entry of a parameter."""
        assert self.prior is not None
        mean, precision = self.prior.moments(self._names[id(p)], p.detach())
        return mean.expand_as(p), precision.expand_as(p)

    def _blocks(
        self, lists: list[list[Tensor]]
    ) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
        """Go through lists of tensors of matching shapes in pieces that suit the processor's caches.

        Args:
            lists: One tensor per parameter in each.

        Yields:
            Tensors to compute in, and the piece of every list: all small tensors, or a part of a large one.
        """
        small: list[int] = []
        for i, first in enumerate(lists[0]):
            if first.numel() <= _LARGE or not all(tensors[i].is_contiguous() for tensors in lists):
                small.append(i)
                continue
            flat = [tensors[i].view(-1) for tensors in lists]
            for parts in zip(*(t.split(_LARGE) for t in flat), strict=True):
                yield [self._scratch.get("part", parts[0].shape, first)], [[part] for part in parts]
        if small:
            some = [[tensors[i] for i in small] for tensors in lists]
            key = (*(t.shape for t in some[0]), some[0][0].dtype, some[0][0].device)
            if key not in self._small:
                self._small[key] = [torch.empty_like(t) for t in some[0]]
            yield self._small[key], some

    def _mean_weights(self) -> dict[str, Tensor]:
        if self._inside:
            raise RuntimeError(
                "posterior() inside sampled() would take the draw for the mean: end it first"
            )
        return snapshot(self.model)
