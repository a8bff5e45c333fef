"""The base of the posterior samplers: the gradient of the energy, the noise and the loop over the weights.

A sampler moves the weights θ so that, after a burn-in, they are draws from p(θ) p(data | θ)^(1/T) ∝ exp(−U),

    U(θ) = train_size / T · loss(θ) − log p(θ),

where the loss is the *mean* over a batch. A sampler that tunes itself and is given no T has a cold posterior,
(p(θ) p(data | θ))^(1/T), where there are many weights for each example (`torchbayes.optim.cold`). A
subclass defines one update of flat tensors as a pure function, and its scalars.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.core import distributed, shards
from torchbayes.core.device import generator_state
from torchbayes.core.noise import normal_
from torchbayes.core.parameters import Params
from torchbayes.optim.base import ModelOptimizer, check_number, check_train_size
from torchbayes.optim.cold import default_temperature
from torchbayes.optim.survey import Measured, curvature_of
from torchbayes.optim.warmup import PlannedRun
from torchbayes.prior import GaussianPrior, Prior, as_prior, own_part

__all__ = ["Sampler"]

_LOG = logging.getLogger("torchbayes")

Sums = dict[str, dict[str, list[tuple[Tensor, int]]]]
"""By quantity and layer, the sum and the number of every weight's entries."""


class Sampler(ModelOptimizer):
    """The base of SGLD, PSGLD, SGHMC, SGNHT and ATMC: a torch optimiser whose weights are a Markov chain.

    Learning-rate schedulers, parameter groups and checkpoints work as with torch's own optimisers, and, as
    there, a parameter without a gradient is not changed. All weights are sampled, including those of norm
    layers. They must be float32 or float64; compute in bfloat16 with `torch.autocast`.

    Args:
        model: The network. Batch norm in it logs a warning (logger `torchbayes`).
        lr: Step size.
        train_size: Number of training examples.
        prior: Prior of the weights: the precision δ of N(0, 1/δ), or a `Prior`.
        temperature: Divisor T of the log-likelihood; the prior is not tempered, as in VOGN. If None, 1 or, of
            a sampler that tunes itself, that of `torchbayes.optim.cold`, for likelihood and prior alike; a
            parameter group that names a `temperature` keeps it.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        generator: Source of the noise; a new one, seeded from torch's, if None. Its state is saved with the
            sampler's.
        settings: Options of the subclass; a parameter group may override them.
        run: The run that the sampler tunes itself for; if None, its steps are as they are given.
    """

    takes_sparse_gradients = True
    needs_whole_weights = ""
    buffers: tuple[str, ...] = ()
    """Names of the sampler's tensors in `state[p]`; they start at 0."""

    def __init__(
        self, model: nn.Module, lr: float, *, train_size: int, prior: Prior | float,
        temperature: float | None, params: Params | None, generator: torch.Generator | None,
        settings: dict[str, Any], run: PlannedRun | None = None,
    ) -> None:  # fmt: skip
        check_number("lr", lr, above=True)
        if temperature is not None:
            check_number("temperature", temperature, above=True)
        self._run = run
        self._own_temperature: set[int] = set()  # places of groups that name theirs
        self._warm = None if run is None else run.warm_up(check_train_size(train_size))
        if self._warm is not None:
            settings = {**settings, "boost": 1.0}
        self.prior = as_prior(prior)
        defaults = {
            "lr": lr, "train_size": train_size,
            "temperature": 1.0 if temperature is None else temperature, "prior_temperature": 1.0,
        }  # fmt: skip
        super().__init__(model, params, defaults | settings, generator=generator)
        named = len(self._own_temperature) == len(self.param_groups)
        if temperature is None and self._warm is not None and not named:
            weights = sum(p.numel() for group in self.param_groups for p in group["params"])
            cold = default_temperature(weights, train_size)
            if cold < 1:
                self.cool(cold)
                _LOG.info(
                    "temperature %.2g: %s weights for %s examples; temperature=1 for the exact posterior",
                    cold, f"{weights:,}", f"{train_size:,}",
                )  # fmt: skip
        if self._sharded:
            self.prior = own_part(self.prior, self._named())
            if self._warm is not None:
                raise ValueError(
                    f"{type(self).__name__} without a step tunes itself by sums over whole weights, which no "
                    "process of a sharded model has: give lr, such as one that was found on a smaller model"
                )
        self._one_chain: bool | None = False if generator is None else None
        norm = next((n for n, m in model.named_modules() if isinstance(m, _BatchNorm)), None)
        if norm is not None:
            _LOG.warning(
                "layer %r is a batch norm: it couples the examples of a batch, so what %s samples is not a "
                "posterior, and its noise adds to the sampler's, so the network underfits; use group norm, "
                "or a network without norm layers such as resnetpp20", norm, type(self).__name__,
            )  # fmt: skip

    def cool(self, temperature: float) -> None:
        """Divide the whole log-posterior by a temperature below 1, before the first step.

        Parameter groups that name a `temperature` keep theirs.
        """
        if self._run is not None:
            self._warm = self._run.warm_up(self.defaults["train_size"], cold=True)
        both = {"temperature": temperature, "prior_temperature": temperature}
        self.defaults |= both  # of groups that are added later
        for place, group in enumerate(self.param_groups):
            if place not in self._own_temperature:
                group |= both

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        named = isinstance(param_group, dict) and "temperature" in param_group
        if named:  # it divides the log-likelihood alone
            param_group = {"prior_temperature": 1.0, **param_group}
        super().add_param_group(param_group)
        if named:
            self._own_temperature.add(len(self.param_groups) - 1)

    def draws_apart(self) -> bool:
        """Whether the processes have chains of their own: not with generators in the same state."""
        if self._sharded:
            return False
        if self._one_chain is None:
            self._one_chain = distributed.alike(generator_state(self.generator).numpy().tobytes())
        return not self._one_chain

    @property
    @abstractmethod
    def update(self) -> Callable[..., None]:
        """The pure function that updates some of the weights in place, as flat tensors of one length.

        Its arguments are the weights θ; the sampler's own tensors in the order of `buffers`, which it may
        change too; the gradient of the mean loss, including that of a prior other than a zero-mean Gaussian;
        standard normal numbers, named `eta`; and, keyword-only, the result of `scalars`, `n` = train_size /
        temperature and the precision `delta` of a Gaussian prior, or 0. The energy's gradient is ∇U =
        n · grad + delta · θ; the two parts stay separate because adding them first would cost more.
        """

    @abstractmethod
    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the update's own scalars for a group's settings and the number of this step, from 1."""

    @property
    def warmup(self) -> int:
        """The updates in which the sampler tunes itself, before the first sample; 0 if it does not."""
        return 0 if self._warm is None else self._warm.updates

    @property
    def shares_state(self) -> bool:
        """Whether weights share a state, so that chains with stacked weights would share it too."""
        return False

    def check(self, group: dict[str, Any]) -> None:
        """Raise a `ValueError` if a group's settings are incompatible with its current learning rate."""

    def kinetic(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor | None:
        """Return p·∇K(p) of every entry of a parameter, or None if there is no momentum p.

        By equipartition its mean is 1 at the right temperature, for any kinetic energy K, including the
        relativistic one.
        """
        momentum = state.get("momentum")
        if momentum is None:
            return None
        m, c = group["mass"], group.get("speed_limit", math.inf)
        squares: Tensor = momentum.square() / m
        return squares if math.isinf(c) else squares / (1 + squares / (m * c**2)).sqrt()

    @torch.no_grad()
    def vitals(self, row: int | None = None) -> dict[str, dict[str, float]]:
        """Return diagnostics of the chain by layer: kinetic `temperature` (ideally 1) and mean `thermostat`.

        A layer is a module that owns weights. A quantity that the sampler does not have is omitted.

        Args:
            row: Restrict to this index of every parameter's first dimension, along which chains are stacked.

        Example:
            >>> import torch, torchbayes as tb
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1))
            >>> sampler = tb.ATMC(model, train_size=10)
            >>> model(torch.ones(4, 3)).sum().backward()
            >>> sampler.step()
            >>> {name: list(layers) for name, layers in sampler.vitals().items()}
            {'temperature': ['0'], 'thermostat': ['0']}
        """
        return self.averages(self.vital_sums(row), float)

    @torch.no_grad()
    def vital_sums(self, row: int | None = None) -> Sums:
        """Return what `vitals` averages: by quantity and layer, the sum and number of every weight's entries.

        Args:
            row: As for `vitals`.
        """
        sums: Sums = {}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if not state:
                    continue
                layer = self._names[id(p)].rpartition(".")[0]
                shared = (
                    torch.full_like(shards.local(p), group["thermostat"])
                    if "thermostat" in group
                    else None
                )
                found = {
                    "temperature": self.kinetic(group, state),
                    "thermostat": state.get("thermostat", shared),
                }
                for name, values in found.items():
                    if values is not None:
                        values = shards.local(values) if row is None else values[row]
                        some = sums.setdefault(name, {}).setdefault(layer, [])
                        some.append((values.sum(dtype=torch.float64), values.numel()))
        return sums

    def averages(self, sums: Sums, read: Callable[[Tensor], float]) -> dict[str, dict[str, float]]:
        """Return averages of sums like those of `vital_sums`, given how to read one, in their order."""
        both: list[float] = []
        for some in (some for of in sums.values() for some in of.values()):
            both += [0.0, 0.0]
            for (
                total,
                count,
            ) in some:  # plainly: the built-in `sum` compensates for rounding since 3.12
                both[-2] += read(total)
                both[-1] += count
        of_all = iter(self._sum(both))
        return {
            name: {layer: next(of_all) / next(of_all) for layer in layers}
            for name, layers in sums.items()
        }

    def end_group(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Run after all weights of a group have been updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights once.

        Args:
            closure: Clears the gradients, computes the *mean* loss of a batch and its gradients, and
                returns the loss. Without it, the existing gradients are used.

        Returns:
            The closure's result.

        Raises:
            FloatingPointError: If a gradient is not finite. Nothing has been changed then. On an accelerator
                it is a gradient of the step before, which has changed the weights: to look at one at once
                would be to wait for the device.
        """
        self._guard()
        if self._only_prepares(closure):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        moving = [p for params in active for p in params]
        bad, _ = self._agreed(self._checked(moving, [_gradient(p) for p in moving]))
        if bad is not None:
            raise self._not_finite(moving[bad])
        for group in self.param_groups:
            self.check(group)
        for group, params in zip(self.param_groups, active, strict=True):
            self._new_state(
                [p for p in params if not self.state[p]], **dict.fromkeys(self.buffers, 0.0)
            )
            alike: dict[Any, list[Tensor]] = {}
            for p in params:
                self.state[p]["step"] += 1
                alike.setdefault((p.device, p.dtype, self.state[p]["step"]), []).append(p)
            for some in alike.values():
                self._update(group, some)
            if params and (self._warm is None or self.state[params[0]]["step"] > self._warm.held):
                self.end_group(group, params)
        if self._sharded:
            shards.reshard(self.model)
        return loss

    def _named(self) -> dict[str, Tensor]:
        return {self._names[id(p)]: p for group in self.param_groups for p in group["params"]}

    def _create_state(self) -> None:
        self._new_state(
            [p for group in self.param_groups for p in group["params"]],
            **dict.fromkeys(self.buffers, 0.0),
        )

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        n = group["train_size"] / group["temperature"]
        cold = group.get("prior_temperature", 1.0)  # earlier versions kept none in checkpoints
        step = self.state[params[0]]["step"]
        states = [[self.state[p][name] for p in params] for name in self.buffers]
        gradients = [_gradient(p) for p in params]
        delta = self.prior.scalar if isinstance(self.prior, GaussianPrior) else None
        delta = None if delta is None else delta / cold
        precisions = [1.0 if delta is None else delta] * len(params)
        if delta is None:
            named = {self._names[id(p)]: shards.local(p.detach()) for p in params}
            log_prior = list(self.prior.grad(named).values())
            if cold != 1:
                torch._foreach_div_(log_prior, cold)
            if self._warm is not None and self._warm.descent < step <= self.warmup:
                precisions = [curvature_of(*pair) for pair in zip(params, log_prior, strict=True)]
            with_prior = torch._foreach_mul(log_prior, -1 / n)
            torch._foreach_add_(with_prior, gradients)
            gradients, delta = list(with_prior), 0.0
        warm = self._warm
        if warm is None:
            self._workspace.apply(
                self.update, [params, *states], [gradients], self.generator,
                **self.scalars(group, step), n=n, delta=delta,
            )  # fmt: skip
            return
        weights = [p.detach() for p in params]
        if step <= warm.tuned:
            found = warm.advance(
                weights, [self.state[p] for p in params], gradients, step=step, n=n, decay=delta,
                precisions=precisions, factor=group["lr"] / self.defaults["lr"],
                generator=self.generator,
            )  # fmt: skip
            if found is not None:
                self._start(group, params, found)
            return
        # In the coordinates φ = θ/s the gradient is s ∇U, and a step of φ moves θ by s times as much.
        scales = [self.state[p]["scale"] for p in params]
        pulled = torch._foreach_add(gradients, weights, alpha=delta / n)
        torch._foreach_mul_(pulled, scales)
        moves = [torch.zeros_like(p) for p in weights]
        boost = warm.boost(step, group["boost"])
        now = group if boost == 1 else {**group, "lr": group["lr"] * boost}
        self._workspace.apply(
            self.update, [moves, *states], [pulled], self.generator, **self.scalars(now, step), n=n,
            delta=0.0,
        )  # fmt: skip
        torch._foreach_addcmul_(weights, scales, moves)
        if step <= warm.held:
            self.hold(group, params, boost)

    def _start(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> None:
        """Begin to sample from the present weights, with momenta of the right temperature."""
        warm = self._warm
        assert warm is not None
        factor = self.settle(group, params, found)
        for p in params:
            self.state[p]["scale"].mul_(factor)
            if "momentum" in self.buffers:
                normal_(self.state[p]["momentum"], self.generator).mul_(math.sqrt(group["mass"]))
        self.hold(group, params, group["boost"])
        _LOG.info(
            "%s has tuned itself in %d updates: noise of the gradient %.3g, largest curvature %.3g of the "
            "mean; samples from update %d on",
            type(self).__name__, warm.tuned, found.noise, found.top, warm.updates,
        )  # fmt: skip

    def settle(self, group: dict[str, Any], params: Sequence[Tensor], found: Measured) -> float:
        """Choose a group's settings after the warm-up, and return a factor of the weights' scales.

        A subclass that tunes itself defines it. In coordinates that are scaled by `scale` alone the mean
        curvature is 1.

        Args:
            group: The group, whose settings are changed.
            params: Weights of the group, whose states may be changed.
            found: What has been measured, and the length of the run.
        """
        raise NotImplementedError

    def hold(self, group: dict[str, Any], params: Sequence[Tensor], boost: float) -> None:
        """Hold what must not adapt at first, while steps are `boost` times as long as later."""


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.to_dense() if p.grad.is_sparse else shards.local(p.grad)
