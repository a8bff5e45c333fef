"""The base of the optimisers that hold a Gaussian over the weights.

Between steps the model has the mean weights. `sampled()` replaces them by a draw, watches the gradients
inside the block, and restores the mean whatever happens. One or more blocks make a step: K draws on one
batch, micro-batches with a draw each, and processes with draws of their own are all averaged the same way,
weighted by the examples they saw (Algorithm 1 of the VOGN paper, lines 5 to 16).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core import distributed
from torchbayes.core.batch import check_mean_loss
from torchbayes.core.parameters import Params, norm_parameters
from torchbayes.curvature.capture import Capture, has_new_gradient, mark_gradients
from torchbayes.optim.base import ModelOptimizer
from torchbayes.posterior import Gaussian, Point, Posterior, Weights, snapshot
from torchbayes.posterior.partial import described
from torchbayes.prior import GaussianPrior, Prior, as_prior

__all__ = ["Statistics", "WeightOptimizer", "add_scaled", "gaussian_prior"]


def add_scaled(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Add y · factor to x in place."""
    return x.addcmul_(y, factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def gaussian_prior(prior: Prior | float) -> GaussianPrior:
    """Return the Gaussian prior that a `prior` argument denotes; raise a `TypeError` for any other prior."""
    resolved = as_prior(prior)
    if not isinstance(resolved, GaussianPrior):
        raise TypeError(
            f"prior is a {type(resolved).__name__}: natural-gradient methods need a Gaussian prior, so give "
            "a GaussianPrior or a precision"
        )
    return resolved


Key = tuple[str, int]
"""The kind of a statistic, and the `id` of its parameter."""

# The power to which a loss scale enters: once in gradients, twice in squares, not at all in inputs.
_POWERS = {"gradient": 1, "draw": 0, "product": 1, "square": 2, "inputs": 0, "outputs": 2}


@dataclass
class Statistics:
    """Tensors with a factor each, so that scaling them costs nothing.

    Attributes:
        tensors: The tensors.
        factors: The factors to multiply them by.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    factors: dict[Key, float] = field(default_factory=dict)

    def put(self, key: Key, tensor: Tensor, factor: float = 1.0) -> None:
        """Add a tensor."""
        self.tensors[key], self.factors[key] = tensor, factor

    def unscale(self, scale: float) -> None:
        """Divide out a loss scale."""
        for key in self.factors:
            self.factors[key] /= scale ** _POWERS[key[0]]

    def has(self, kind: str, p: Tensor) -> bool:
        """Whether a parameter has a statistic of this kind."""
        return (kind, id(p)) in self.tensors

    def factor(self, kind: str, p: Tensor) -> float:
        """Return the factor to multiply the tensor by."""
        return self.factors[(kind, id(p))]

    def value(self, kind: str, p: Tensor) -> Tensor:
        """Return the tensor times its factor."""
        tensor, factor = self.tensors[(kind, id(p))], self.factor(kind, p)
        return tensor if factor == 1.0 else tensor * factor


@dataclass
class Bank:
    """Sums of statistics over blocks, weighted by examples."""

    sums: dict[Key, Tensor] = field(default_factory=dict)
    examples: float = 0.0
    empty: bool = True

    def add(self, statistics: Statistics, examples: float) -> None:
        """Add the means of a block with this many examples."""
        for key, tensor in statistics.tensors.items():
            weight = statistics.factors[key] * examples
            if key in self.sums:
                self.sums[key].add_(tensor, alpha=weight)
            else:
                self.sums[key] = tensor * weight
        self.examples += examples
        self.empty = False

    def reduce(self, shapes: Mapping[Key, Tensor]) -> None:
        """Sum over processes, in one message.

        Args:
            shapes: A tensor of the right shape for each statistic. A process that has not seen a weight
                contributes zeros; a weight that no process has seen is left out.
        """
        values = [
            self.sums[key] if key in self.sums else torch.zeros_like(t, requires_grad=False)
            for key, t in shapes.items()
        ]
        seen = [self.examples, *(float(key in self.sums) for key in shapes)]
        counts = torch.tensor(seen, device=values[0].device)
        distributed.sum_packed([counts, *values])
        self.examples, *used = counts.tolist()
        self.empty = False
        self.sums = {key: t for key, t, n in zip(shapes, values, used, strict=True) if n > 0}

    def mean(self) -> Statistics:
        """Return the weighted means."""
        return Statistics(self.sums, dict.fromkeys(self.sums, 1.0 / max(self.examples, 1.0)))


class WeightOptimizer(ModelOptimizer):
    """An optimiser whose state is a distribution over the weights of a model.

    A subclass defines how the mean is perturbed and how the statistics of a step update its state.

    Args:
        model: The network.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        defaults: Default options of the groups, including `train_size`.
        mc_samples: Draws per call of `step(closure)`.
        generator: Source of the noise; a new one, seeded from torch's, if None.
        prior: Gaussian prior. If it is the same for all weights, its precision is the group option `prior`.
    """

    # GradScaler then passes its scale instead of unscaling `.grad`: squares need it squared.
    _step_supports_amp_scaling = True
    random = True
    reduces_statistics = True  # over processes: squares and products with noise, not only gradients

    def __init__(
        self, model: nn.Module, params: Params | None, defaults: dict[str, Any], *,
        mc_samples: int, generator: torch.Generator | None, prior: GaussianPrior,
    ) -> None:  # fmt: skip
        if mc_samples < 1:
            raise ValueError(f"mc_samples is {mc_samples}: expected at least 1 draw per step")
        self.mc_samples = mc_samples
        self.prior = prior if prior.scalar is None else None
        super().__init__(model, params, defaults | {"prior": prior.scalar}, generator=generator)

    def _prepare(self) -> None:
        super()._prepare()
        norms = norm_parameters(self.model)
        self._fixed = {key for key, name in self._names.items() if name in norms}
        self._capture: Capture | None = None
        self._bank = Bank()
        self._unbanked = False
        self._inside = False
        self._scaler_seen: float | None = None
        self._local_examples = 0
        self._largest_call = 0
        self._batch_size = 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        super().add_param_group(param_group)
        self._capture = None

    # For subclasses to define.

    watches_examples = False
    """Whether per-example statistics are needed."""

    @abstractmethod
    def _relative(self, group: dict[str, Any], precision: Any) -> Any:
        """Return a prior precision, a number or a tensor, in the units of the mean loss's curvature."""

    @abstractmethod
    def _spread(self, group: dict[str, Any], p: Tensor) -> tuple[float, Tensor | float]:
        """Return numerator and denominator of the variance of a parameter's entries."""

    @abstractmethod
    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the group's parameters that have a spread to draw from."""

    @abstractmethod
    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        """Fill `draws` with draws of the weights."""

    @abstractmethod
    def _statistics(self) -> Statistics:
        """Return the means over the last block's examples, at the gradients' current scale."""

    def _additive(self, statistics: Statistics) -> Statistics:
        """Return the statistics in a form that can be averaged over blocks."""
        return statistics

    @abstractmethod
    def _update(self, statistics: Statistics) -> None:
        """Update state and mean."""

    @torch.no_grad()
    def posterior(self) -> Posterior:
        """Return a Gaussian for every weight; scales and shifts of norm layers are deterministic.

        Without noise, return the weights as a `Point`.
        """
        mean, about = self._mean_weights()
        return Gaussian(mean, self._std(), **about) if self.random else Point(mean, **about)

    # Drawing.

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Replace the mean weights by a draw; run forward and backward passes inside.

        Several blocks before a `step()` are averaged, weighted by their examples; a block without a backward
        pass does not count. The mean is restored at the end of the block, also after an exception, in which
        case the block does not count either.
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
                # A later backward pass would use the mean where the forward pass used the draw: make it fail.
                torch.autograd.graph.increment_version(p)
            self._inside = False
        self._unbanked = any(has_new_gradient(p) for p in self._parameters())

    def _draw(self) -> list[tuple[Tensor, Tensor]]:
        groups = [(group, self._perturbable(group)) for group in self.param_groups]
        groups = [(group, [p for p in params if p.requires_grad]) for group, params in groups]
        draws = {id(p): self._workspace.twin("draw", p) for _, params in groups for p in params}
        for group, params in groups:
            if params:
                self._perturb(group, params, [draws[id(p)] for p in params])
        return [(p, draws[id(p)]) for _, params in groups for p in params]

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
        shared = distributed.in_group() and distributed.world_size() > 1
        if not (self._unbanked or shared) and self._bank.empty:  # a process may have no examples
            raise RuntimeError(
                "step() has no gradients of a draw: call step(closure), or run the backward pass inside "
                "`with optimizer.sampled():` first"
            )
        unscaled_outside = found_inf is not None and scale is None and self._scaler_seen is None
        if unscaled_outside and self.watches_examples:
            raise ValueError(
                "the gradients were unscaled outside sampled(): call scaler.unscale_(optimizer) inside the "
                "block, so that squared gradients are unscaled too"
            )
        statistics = self._gathered(shared)
        examples = self._local_examples if self._bank.empty else self._bank.examples
        self._batch_size = max(1.0, examples / self.mc_samples)  # all draws see the same examples
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
        self._unbanked, self._bank = False, Bank()

    def _bank_block(self) -> None:
        """Store the statistics of the last block, because another one follows."""
        if not self._unbanked:
            return
        with torch.no_grad():
            self._bank.add(self._additive(self._statistics()), float(self._local_examples))
            for p in self._parameters():
                p.grad = None  # it is in the bank now
        self._unbanked = False

    def _gathered(self, shared: bool) -> Statistics:
        """Return the means over all blocks, of all processes if they share the work."""
        if self._bank.empty and not shared:
            return self._statistics()
        if self._unbanked:
            self._bank.add(self._additive(self._statistics()), float(self._local_examples))
        if shared:
            self._bank.reduce(self._shapes())
        return self._bank.mean()

    def _shapes(self) -> dict[Key, Tensor]:
        """Return a tensor of the right shape for every statistic, in an order that all processes share."""
        kinds = ("gradient", "square") if self.watches_examples else ("gradient", "product")
        return {(kind, id(p)): p for p in self._parameters() if p.requires_grad for kind in kinds}

    # For subclasses.

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _prior_terms(
        self, group: dict[str, Any], params: Sequence[Tensor], *, fixed: bool = False
    ) -> tuple[float | list[Tensor], float | list[Tensor]]:
        """Return the prior's relative precision and mean: one number for all weights, or tensors."""
        if fixed:
            return 0.0, 0.0
        if self.prior is None:
            return float(self._relative(group, group["prior"])), 0.0
        deltas, means = [], []
        for p in params:
            mean, precision = self.prior.moments(self._names[id(p)], p.detach())
            deltas.append(self._relative(group, precision.expand_as(p)))
            means.append(mean.expand_as(p))
        return deltas, means

    def _delta(self, group: dict[str, Any], p: Tensor) -> float | Tensor:
        """Return the prior's relative precision of one parameter."""
        deltas, _ = self._prior_terms(group, [p])
        return deltas if isinstance(deltas, float) else deltas[0]

    def _state_of(self, name: str, params: Sequence[Tensor], start: float) -> list[Tensor]:
        """Return the named state of parameters, first created (with a momentum) where there is none."""
        fresh = [p for p in params if name not in self.state[p]]
        if fresh:
            self._new_state(fresh, momentum=0.0, **{name: start})
        return [self.state[p][name] for p in params]

    def _std(self) -> Weights:
        """Return the standard deviations of the random weights."""
        result: Weights = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in self._fixed:
                    above, below = self._spread(group, p)
                    variance = torch.full_like(p, above).div_(below)
                    result[self._names[id(p)]] = variance.sqrt_().detach()
        return result

    def _mean_weights(self) -> tuple[Weights, dict[str, str]]:
        """Return what a posterior holds as its mean, and what it knows about the network."""
        if self._inside:
            raise RuntimeError(
                "posterior() inside sampled() would take the draw for the mean: end it first"
            )
        held = self._held()
        return snapshot(self.model, held), described(self.model, held)
