"""The base of the optimisers that hold a Gaussian over the weights.

Between steps the model has the mean weights. `sampled()` replaces them by a draw, watches the gradients
inside the block, and restores the mean whatever happens. One or more blocks make a step (Algorithm 1 of the
VOGN paper, lines 5 to 16). Their gradients add up in `.grad`, as in torch, so the loss of each of k pieces is
divided by k, whether the pieces are micro-batches or draws. `step(closure)` divides by its number of draws
itself, and processes with draws of their own are averaged, weighted by the examples they saw.
"""

from __future__ import annotations

import struct
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core import distributed, shards
from torchbayes.core.batch import LossWatch, LossWeights, check_mean_loss
from torchbayes.core.fan_in import fan_ins, least_precision, rate_share
from torchbayes.core.parameters import Params, norm_parameters
from torchbayes.core.reduction import Reduction
from torchbayes.curvature.capture import Capture, has_new_gradient, is_marked, mark_gradients
from torchbayes.optim.base import ModelOptimizer
from torchbayes.posterior import Gaussian, Point, Posterior, Weights, snapshot
from torchbayes.posterior.partial import described
from torchbayes.prior import GaussianPrior, Prior, as_prior, own_part

__all__ = [
    "Statistics",
    "WeightOptimizer",
    "add_scaled",
    "bounded_draw",
    "gaussian_prior",
]


def add_scaled(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Add y · factor to x in place."""
    return x.addcmul_(y, factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def bounded_draw(
    theta: Tensor, mu: Tensor, s: Tensor, eta: Tensor, *, delta: float | Tensor, least: float, n: float
) -> None:  # fmt: skip
    """Draw θ = μ + ησ with σ² = 1/(n max(s + δ, least)); θ may share its memory with η."""
    root = (s + delta).clamp_min_(least).rsqrt_()
    torch.addcmul(mu, eta, root, value=n**-0.5, out=theta)


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


def _wide(p: Tensor) -> Tensor:
    """Return a tensor like the squares of a weight's gradient, which have at least single precision."""
    return p if p.dtype.itemsize >= 4 else torch.empty_like(p, dtype=torch.float32)


class Bank:
    """Sums of statistics over a closure's draws and over processes, weighted by examples.

    Args:
        reduction: Sums over processes that have begun; None for a process that does not share its work.
    """

    def __init__(self, reduction: Reduction[Key] | None = None) -> None:
        self._reduction = reduction
        self._sums: dict[Key, Tensor] = {}
        self.examples, self.empty = 0.0, True

    def add(self, statistics: Statistics, examples: float, *, last: bool = False) -> None:
        """Add the means over this many examples.

        Args:
            statistics: The means.
            examples: The examples.
            last: Whether nothing more will be added in this step.
        """
        for key, tensor in statistics.tensors.items():
            weight = statistics.factors[key] * examples
            if self._reduction is not None:
                (self._reduction.put if last else self._reduction.hold)(key, tensor, weight)
            elif key in self._sums:
                self._sums[key].add_(tensor, alpha=weight)
            else:
                self._sums[key] = tensor * weight
        self.examples += examples
        self.empty = False

    def mean(self) -> Statistics:
        """Return the weighted means, those of all processes.

        A process that has not seen a weight counts as zeros; a weight that no process has seen is left out.
        """
        if self._reduction is None:
            return Statistics(self._sums, dict.fromkeys(self._sums, 1.0 / max(self.examples, 1.0)))
        self.examples, means = self._reduction.finish(self.examples)
        return Statistics(means, dict.fromkeys(means, 1.0))


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
        if self._sharded and self.prior is not None:
            own = own_part(self.prior, {self._names[id(p)]: p for p in self._parameters()})
            self.prior = gaussian_prior(own)

    def _prepare(self) -> None:
        super()._prepare()
        norms = norm_parameters(self.model)
        self._fixed = {key for key, name in self._names.items() if name in norms}
        fans = fan_ins(self.model)
        self._leasts = {key: least_precision(fan_in) for key, fan_in in fans.items()}
        self._shares = {key: rate_share(fan_in) for key, fan_in in fans.items()}
        self._capture: Capture | None = None
        self._reduction: Reduction[Key] = Reduction()
        self._inside = False
        self._last = False  # whether a closure of `step` has its last draw, not after other blocks
        self._means: dict[int, Tensor] = {}  # of the weights that have a draw now
        self._pending = False  # whether `.grad` has gradients of blocks that no step has used
        self._scaler_seen: float | None = None
        self._batch_size = 1.0
        self._cleared = False  # whether zero_grad() was called in the last block
        self._block_examples, self._block_call = 0, 0
        self._largest_call: int
        self._restart()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        super().add_param_group(param_group)
        self._capture = None

    def __getstate__(self) -> dict[str, Any]:
        if self._inside:
            raise RuntimeError(
                "a copy of the optimiser inside sampled() would take the draw for the mean: end it first"
            )
        return super().__getstate__()

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
        """Return the means over the blocks' examples, at the gradients' current scale."""

    def _before_redraw(self) -> None:
        """Keep what the last draw is still needed for: another one follows, and gradients are added up."""

    def _joining(
        self, chosen: Sequence[tuple[Tensor, Tensor]], means: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients at another draw are added to earlier ones.

        Args:
            chosen: Parameters and their draws.
            means: Their means.
        """
        return nullcontext()

    sends_early = False
    """Whether `_early` is defined."""

    def _early(self, p: Tensor) -> tuple[Statistics, float] | None:
        """Return what a step will have of one weight if nothing follows its gradient, which has arrived.

        Args:
            p: The weight; inside a block, so it has the draw.

        Returns:
            Its additive statistics, in the tensors that they will be in, and the number of examples; None if
            they are not known yet.
        """
        return None

    def _additive(self, statistics: Statistics) -> Statistics:
        """Return the statistics in a form that can be averaged over draws."""
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
    def sampled(self, *, examples: int | None = None) -> Iterator[None]:
        """Replace the mean weights by a draw; run forward and backward passes inside.

        Gradients add up in `.grad` over the backward passes of a block and over blocks, as in torch, until
        `zero_grad()`. Divide the loss of each of k pieces by k, so that their sum is one mean loss:

            optimizer.zero_grad()
            for x, y in pieces:                              # each with a draw of its own
                with optimizer.sampled():
                    (F.cross_entropy(model(x), y) / len(pieces)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # of the sum
            optimizer.step()

        Losses that were clearly not divided raise a `ValueError`. Squares of per-example gradients, where
        the optimiser needs them, are those of the undivided loss. Pieces of different sizes are weighted as
        the losses are: for the mean over all examples, weight each by its share of them.

        A block without a backward pass does not count. The mean is restored at the end of the block, also
        after an exception; the gradients of the step are cleared then.

        Args:
            examples: Number of examples of which the block's loss is the mean; if None, the length of the
                model's first input. Give it where that is something else, as for a graph of which only some
                nodes have labels.
        """
        if self._inside:
            raise RuntimeError("sampled() is already open: end it before drawing again")
        if examples is not None and examples < 1:
            raise ValueError(f"examples is {examples}: expected the number of labels, at least 1")
        again = self._pending and any(p.grad is not None for p in self._parameters())
        if not again:
            self._restart()
        self._cleared = False
        with torch.no_grad():
            if again:
                self._before_redraw()
            chosen = self._draw() if self.random else []
        # FSDP gathers weights from the memory that they had at first, so that a draw has to be there.
        in_place = self._sharded
        means = [
            shards.local(self._workspace.twin("mean", p)) if in_place else p.data for p, _ in chosen
        ]
        self._inside, ended = True, False
        self._guard()
        try:
            for (p, draw), mean in zip(chosen, means, strict=True):
                if in_place:
                    mean.copy_(shards.local(p.detach()))
                    shards.local(p.detach()).copy_(shards.local(draw))
                else:
                    p.data = draw
            if in_place:
                shards.reshard(self.model)
            joining = self._joining(chosen, means) if again else nullcontext()
            self._means = {id(p): mean for (p, _), mean in zip(chosen, means, strict=True)}
            with self._watching(again, examples), joining:
                yield
            ended = True
        finally:
            for (p, _), mean in zip(chosen, means, strict=True):
                if in_place:
                    shards.local(p.detach()).copy_(mean)
                    continue
                p.data = mean
                # A later backward pass would use the mean where the forward pass used the draw: make it fail.
                torch.autograd.graph.increment_version(p)
            if in_place:
                shards.reshard(self.model)
            self._inside, self._means = False, {}
            if not ended:
                self.zero_grad()
        if not (again or self._cleared):
            self._warn_of_leftovers()
        self._pending = self._pending or any(has_new_gradient(p) for p in self._parameters())

    @property
    def drawing(self) -> bool:
        """Whether the model has a draw of the weights now: inside `sampled()`, or in a closure of `step`."""
        return self._inside

    def draws_apart(self) -> bool:
        """Whether each process of a group has weights of its own now: while it has a draw of them."""
        return self._inside and self.random and not self._sharded

    def _warn_of_leftovers(self) -> None:
        """Warn if the block's gradients were added to some that no block has computed."""
        for p in self._parameters():
            if is_marked(p) and has_new_gradient(p):  # the same tensor as before the block
                warnings.warn(
                    f"the gradient of {self._names[id(p)]!r} from before this sampled() block was not "
                    "cleared, so the block's was added to it: call zero_grad() after each step, and run the "
                    "backward pass of every piece inside a block",
                    stacklevel=4,
                )
                return

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them what was gathered in `sampled()` blocks since the last step."""
        if self._inside and self._pending:
            warnings.warn(
                "zero_grad() in this sampled() block clears the gradients of earlier blocks, which no step() "
                "has used: to add up the gradients of several draws or pieces, call it once before the first "
                "block and divide each loss by their number",
                stacklevel=2,
            )
        with torch._C.DisableTorchFunction():  # a mode would see every access to a `.grad`
            super().zero_grad(set_to_none)
        self._cleared = True
        self._restart()

    def _draw(self) -> list[tuple[Tensor, Tensor]]:
        groups = [(group, self._perturbable(group)) for group in self.param_groups]
        groups = [(group, [p for p in params if p.requires_grad]) for group, params in groups]
        draws = {id(p): self._workspace.twin("draw", p) for _, params in groups for p in params}
        for group, params in groups:
            if params:
                self._perturb(group, params, [draws[id(p)] for p in params])
        return [(p, draws[id(p)]) for _, params in groups for p in params]

    @contextmanager
    def _watching(self, again: bool, examples: int | None) -> Iterator[None]:
        if self.watches_examples:
            if self._capture is None:
                self._capture = self._new_capture()
            with self._capture.block(fresh=not again, examples=examples):
                yield
            self._scaler_seen = self._capture.unscaled
            self._note_calls(self._capture.largest_batch, examples)
            return
        mark_gradients(self._parameters())
        self._block_examples, self._block_call = 0, 0
        handle = self.model.register_forward_pre_hook(self._count_examples, with_kwargs=True)
        try:
            with LossWatch(self._saw_loss):
                yield
        finally:
            handle.remove()
        self._examples += self._block_examples if examples is None else examples
        self._note_calls(self._block_call, examples)

    def _saw_loss(self, loss: Tensor) -> None:
        if self._pending and all(p.grad is None for p in self._parameters()):
            self._restart()  # the model's zero_grad() has cleared them
        self._losses.add(loss, self._block_call or None)

    def _note_calls(self, largest: int, examples: int | None) -> None:
        self._largest_call = max(self._largest_call, largest if examples is None else examples)

    def _new_capture(self) -> Capture:
        return Capture(self.model, {self._names[id(p)]: p for p in self._parameters()})

    def _count_examples(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._losses.calls += 1
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.dim() > 0:
                self._block_examples += value.shape[0]
                self._block_call = max(self._block_call, value.shape[0])
                return

    # Stepping.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, examples: int | None = None) -> Any:
        """Update the distribution.

        Args:
            closure: Clears the gradients, computes the *mean* loss of a batch and its gradients, and
                returns the loss. It is called once per draw. Without it, `sampled()` must have been used.
                After `sampled()` blocks it is the last piece of their step, and must not clear their
                gradients.
            examples: Number of examples of which the closure's loss is the mean, as for `sampled()`.

        Returns:
            The closure's loss, averaged over the draws.

        Raises:
            FloatingPointError: If a gradient is not finite. Nothing has been changed then. On an accelerator
                it is a gradient of the step before, which has changed the weights: to look at one at once
                would be to wait for the device.
        """
        if self._only_prepares(closure):
            return None
        # The gradients of a sharded model are means over all processes, at one draw.
        shared = distributed.in_group() and distributed.world_size() > 1 and not self._sharded
        if shared:
            self._reduction.begin(self._shapes(), apart=self.sends_early)
        loss: Any = None
        bank = Bank(self._reduction if shared else None)
        if closure is not None:
            self._check_joinable()
            try:
                loss = self._run(closure, bank, examples)
            except BaseException:
                self._forget()
                raise
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self._overflowed(found_inf, scale, shared):
            self._forget()
            return loss
        if not (self._pending or shared) and bank.empty:  # a process may have no examples
            raise RuntimeError(
                "step() has no gradients of a draw: call step(closure), or run the backward pass inside "
                "`with optimizer.sampled():` first; for the trainers of other libraries see "
                "torchbayes.integrations"
            )
        if found_inf is not None and scale is None and self._scaler_seen is None:
            self._unscaled_outside()
        self._watched().check_total()
        statistics, count = self._gathered(bank, shared)
        seen = [p for p in self._parameters() if statistics.has("gradient", p)]
        try:
            bad = self._checked(seen, [statistics.tensors["gradient", id(p)] for p in seen])
        except (FloatingPointError, ValueError):
            self._forget()
            raise
        bad, count = self._agreed(bad, count)
        self._batch_size = max(1.0, count / self.mc_samples)  # all draws see the same examples
        self._check_train_size()
        if scale is not None:
            statistics.unscale(float(scale))
        try:
            if bad is not None:
                raise self._not_finite(seen[bad])
            self._update(statistics)
        finally:
            self._forget()
            if self._sharded:
                shards.reshard(self.model)
        return loss

    def _check_joinable(self) -> None:
        """Start anew for a closure, unless it is the last piece of a step that `sampled()` blocks began."""
        if not self._pending or all(p.grad is None for p in self._parameters()):
            self._forget()
        elif self.mc_samples > 1:
            raise RuntimeError(
                f"step(closure) draws {self.mc_samples} times (mc_samples), but there are gradients of "
                "earlier sampled() blocks, to which only one draw can be added: call zero_grad() to discard "
                "them, or use mc_samples=1"
            )

    def _run(self, closure: Callable[[], Any], bank: Bank, examples: int | None) -> Any:
        """Run the closure once per draw; with several draws, gather their statistics."""
        total: Any = None
        for draw in range(self.mc_samples):
            last = draw + 1 == self.mc_samples
            self._last = last and examples is None and not self._pending
            try:
                with self.sampled(examples=examples), torch.enable_grad():
                    loss = closure()
            finally:
                self._last = False
            if isinstance(loss, Tensor):
                if self._largest_call > 0:
                    check_mean_loss(loss, self._largest_call)
                loss = loss.detach()
            total = loss if total is None else total + loss
            if not last and self._pending:
                bank.add(self._additive(self._statistics()), self._local_examples)
                self._pending = False
                for p in self._parameters():
                    p.grad = None  # it is in the bank
        return total if self.mc_samples == 1 or total is None else total / self.mc_samples

    def _overflowed(self, found_inf: Tensor, scale: Tensor | None, shared: bool) -> bool:
        """Whether a `GradScaler` has found an overflow, in any of the processes that share the step."""
        over = float(found_inf) > 0
        if not shared:
            return over
        if scale is not None and not distributed.alike(struct.pack("<d", float(scale))):
            self._forget()
            raise ValueError(
                f"the processes' loss scales differ (here it is {float(scale):g}), because each GradScaler "
                "lowers its own when it finds an overflow: use bfloat16, which needs none, or "
                "fit(amp='float16'), which keeps them alike"
            )
        return distributed.any_of([over])[0]

    def _unscaled_outside(self) -> None:
        """Find the scale of squares when a `GradScaler` has unscaled the gradients after the blocks."""
        factor = self._watched().scale
        if not self.watches_examples:
            return
        if factor is None:
            raise ValueError(
                "the gradients were unscaled but the loss shows no scale: call "
                "scaler.scale(loss).backward() inside sampled()"
            )
        self._scaler_seen = 1.0 / float(factor)

    def _check_train_size(self) -> None:
        for group in self.param_groups:
            if self._largest_call > group["train_size"]:
                raise ValueError(
                    f"train_size is {group['train_size']} but a batch has {self._largest_call} examples: "
                    "train_size is the number of examples in the whole training set, and "
                    "sampled(examples=…) says how many a batch has if its rows are not examples"
                )

    def _restart(self) -> None:
        """Start the sums over blocks again."""
        self._pending = False
        self._examples, self._largest_call = 0.0, 0
        self._losses = LossWeights()
        if self._capture is not None:
            self._capture.restart()

    def _forget(self) -> None:
        self._restart()
        self._scaler_seen = None

    def _watched(self) -> LossWeights:
        return self._losses if self._capture is None else self._capture.losses

    @property
    def _local_examples(self) -> float:
        """Number of examples of the blocks of this step in this process."""
        return self._examples if self._capture is None else self._capture.examples

    def _gathered(self, bank: Bank, shared: bool) -> tuple[Statistics, float]:
        """Return the means over all draws, of all processes if they share the work, and their examples."""
        if bank.empty and not shared:
            return self._statistics(), self._local_examples
        if self._pending:
            bank.add(self._additive(self._statistics()), self._local_examples, last=True)
        return bank.mean(), bank.examples

    def _shapes(self) -> dict[Key, Tensor]:
        """Return a tensor of the right shape for every statistic, in an order that all processes share."""
        kinds = ("gradient", "square") if self.watches_examples else ("gradient", "product")
        return {  # backward: the order in which gradients arrive
            (kind, id(p)): _wide(p) if kind == "square" else p
            for p in reversed(self._parameters()) if p.requires_grad for kind in kinds
        }  # fmt: skip

    @contextmanager
    def sent_early(self) -> Iterator[None]:
        """Send statistics to other processes while the backward pass inside the block goes on.

        For who runs everything from there to the update, as `fit` does: in a closure of `step`, around the
        last backward pass of a draw, after which nothing changes a gradient. It does nothing elsewhere, in
        draws that others follow, and after earlier blocks.
        """
        if not (self._last and self._reduction.watches):
            yield
            return

        def arrived(p: Tensor) -> None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                found = None if p.grad is None else self._early(p)
                if found is None:
                    return
                statistics, count = found
                for key, tensor in statistics.tensors.items():
                    self._reduction.early(key, tensor, statistics.factors[key] * count)

        handles = [
            p.register_post_accumulate_grad_hook(arrived)
            for p in self._parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # For subclasses.

    @staticmethod
    def _alike(
        params: Sequence[Tensor], value: Callable[[Tensor], float]
    ) -> Iterator[tuple[float, list[int]]]:
        """Go through the values of a function of parameters, each with the places of those that have it."""
        found: dict[float, list[int]] = {}
        for place, p in enumerate(params):
            found.setdefault(value(p), []).append(place)
        yield from found.items()

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
            own = shards.local(p.detach())
            mean, precision = self.prior.moments(self._names[id(p)], own)
            deltas.append(self._relative(group, precision.expand_as(own)))
            means.append(mean.expand_as(own))
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
                    variance = torch.full_like(shards.local(p.detach()), above).div_(below)
                    result[self._names[id(p)]] = shards.whole(shards.wrapped(variance.sqrt_(), p))
        return result

    def _mean_weights(self) -> tuple[Weights, dict[str, str]]:
        """Return what a posterior holds as its mean, and what it knows about the network."""
        if self._inside:
            raise RuntimeError(
                "posterior() inside sampled() would take the draw for the mean: end it first"
            )
        self.look()
        held = self._held()
        return snapshot(self.model, held), described(self.model, held)
