"""Methods whose wrapper around the network draws, perturbs or generates its weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.core import distributed
from torchbayes.core.names import named_parameters
from torchbayes.core.parameters import trainable
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP, MLE
from torchbayes.posterior import Generated, Posterior
from torchbayes.predict.batchnorm import recalibrate_each
from torchbayes.prior import GaussianPrior
from torchbayes.train.method import Method, Plan, loss_of
from torchbayes.variational import VBLL, Hypernet, HypernetSGD, MeanField
from torchbayes.variational.objective import annealed_weight, blundell_weight

__all__ = ["HypernetMethod", "LastLayerMethod", "MeanFieldMethod", "WrapperMethod"]

_KL_SCHEDULES = ("uniform", "blundell", "linear")

# A posterior is called collapsed to the prior if the data have told it less than this many nats per
# weight and per example, and to a point if nine weights in ten have a σ below this share of their size.
_NATS_PER_WEIGHT, _NATS_PER_EXAMPLE = 1e-2, 1e-3
_POINT_STD, _POINT_SHARE = 1e-3, 0.9


class WrapperMethod(Method):
    """A wrapper with a `posterior()`, whose network is trained as `MAP` trains it: MC-dropout."""

    uses = (MAP,)

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        self.module = self.build(self.algorithm, model)
        # The optimiser sees the plain network: the wrapper has no parameters of its own.
        self.set_optimizer(self.build(MAP, model))

    def posterior(self) -> Posterior:
        """Return what the wrapper has learned."""
        posterior: Posterior = self.module.posterior()  # type: ignore[operator]
        return posterior


class MeanFieldMethod(Method):
    """A mean field trained on the free energy, minibatch by minibatch: Bayes by Backprop.

    The loss is mean NLL + weight · KL / train_size; `nll` and `kl`, both in nats per training example,
    are logged apart, the latter without its weight.

    Args:
        mc_samples: Draws per update; their losses are averaged.
        kl_schedule: `"uniform"`; `"blundell"`, by which the first minibatches of each epoch pay most of the
            KL term; or `"linear"`, by which it rises from 0 at the start and is uniform afterwards.
        kl_warmup: Share of all updates that the linear rise takes.
    """

    uses: ClassVar[tuple[type, ...]] = (MLE,)
    module: MeanField

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        mc_samples: int = 1,
        kl_schedule: str = "uniform",
        kl_warmup: float = 0.25,
        **options: Any,
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        if kl_schedule not in _KL_SCHEDULES:
            raise ValueError(
                f"kl_schedule is {kl_schedule!r}: expected {' or '.join(_KL_SCHEDULES)}"
            )
        if not 0 <= kl_warmup <= 1:
            raise ValueError(f"kl_warmup is {kl_warmup:g}: expected a share of the updates, 0 to 1")
        if mc_samples < 1:
            raise ValueError(f"mc_samples is {mc_samples}: expected at least 1 draw")
        self.mc_samples, self.kl_schedule, self.kl_warmup = mc_samples, kl_schedule, kl_warmup
        self.module = self.build(MeanField, model)
        self.updates = 0
        self._warned = False
        self.set_optimizer(self.build(MLE, self.module))

    def posterior(self) -> Posterior:
        """Return the Gaussian that has been learned."""
        return self.module.posterior()

    @property
    def kl_weight(self) -> float:
        """Weight of KL / train_size in the next update's loss."""
        steps = self.plan.steps_per_epoch
        if self.kl_schedule == "blundell":
            return blundell_weight(self.updates % steps, steps)
        if self.kl_schedule == "linear":
            rise = math.ceil(self.kl_warmup * self.plan.epochs * steps)
            return annealed_weight(self.updates, max(1, rise))
        return 1.0

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the minibatch's share of the free energy, per example."""
        nlls, kls = [], []
        for _ in range(self.mc_samples):
            nlls.append(loss_of(self.likelihood, self.outputs(inputs), targets, weights))
            # The exact KL is the same for every draw, so one of them serves.
            if len(nlls) == self.mc_samples or not isinstance(self.module.prior, GaussianPrior):
                kls.append(self.module.kl())
        nll = torch.stack(nlls).mean()
        kl = torch.stack(kls).mean() / self.plan.train_size
        self.logs = {"nll": nll.detach(), "kl": kl.detach()}
        return nll + self.kl_weight * kl

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take one step."""
        try:
            return super().step(closure)
        finally:
            self.updates += 1

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Check whether the posterior has collapsed, once the KL term has its full weight."""
        late = 2 * (epoch + 1) >= self.plan.epochs and (
            self.kl_schedule != "linear" or self.kl_weight == 1
        )
        if late and not self._warned and "kl" in self.logs:
            complaint = self._collapse(float(self.logs["kl"]))
            if complaint is not None:
                self._warned = True
                warnings.warn(complaint, stacklevel=2)

    def _collapse(self, kl: float) -> str | None:
        """Describe what is wrong with the posterior, if anything, given the KL per training example."""
        stds = self.module.std()
        count = sum(std.numel() for std in stds.values())
        per_weight = kl * self.plan.train_size / count
        if per_weight < _NATS_PER_WEIGHT and kl < _NATS_PER_EXAMPLE:
            return (
                f"the posterior has collapsed to the prior (KL {per_weight:.1g} nats per weight): it has "
                "learned nothing; try a smaller init_std, a longer kl_warmup or more epochs"
            )
        weights = named_parameters(self.model)
        narrow = sum(int((std < _POINT_STD * weights[n].abs()).sum()) for n, std in stds.items())
        if narrow > _POINT_SHARE * count:
            return (
                f"the posterior has collapsed to a point ({narrow / count:.0%} of its weights have a "
                "standard deviation below 0.1 % of their size): its draws hardly differ; try a larger "
                "init_std or more epochs"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the mean field, its optimiser and the number of updates."""
        return super().state_dict() | {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        super().load_state_dict(state)
        self.updates = state["updates"]


class LastLayerMethod(Method):
    """A variational last layer, trained together with the weights before it on a closed-form bound.

    The loss is the bound on the mean NLL + (KL − log prior of the other weights) / train_size; `nll` and
    `kl`, which has both, are logged apart, in nats per training example.
    """

    uses: ClassVar[tuple[type, ...]] = (MLE,)
    module: VBLL

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        self.module = self.build(VBLL, model, likelihood=likelihood, output=plan.output)
        noise = {id(p) for p in likelihood.parameters()}  # fit trains it, as with every method
        own = [p for p in trainable(self.module).values() if id(p) not in noise]
        self.set_optimizer(self.build(MLE, self.module, params=own))

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the bound of the minibatch, per example."""
        nll, kl = self.module.terms(inputs, targets, weights)
        self.logs = {"nll": nll.detach(), "kl": kl.detach()}
        return nll + kl

    def posterior(self) -> Posterior:
        """Return the Gaussian that has been learned."""
        return self.module.posterior()


class HypernetMethod(Method):
    """A hypernetwork: weights generated from noise, trained on the likelihood with one draw per batch.

    In a network with batch norm the statistics of `draws` draws are re-estimated on the training data
    when the training ends, and predictions average over these draws.

    Args:
        draws: Number of draws that get batch-norm statistics of their own.
    """

    uses = (HypernetSGD,)
    module: Hypernet

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        draws: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(model, likelihood, plan, **options)
        if draws < 1:
            raise ValueError(f"draws is {draws}: expected at least 1")
        if plan.start is not None:
            raise ValueError(
                "hypernet generates its weights and cannot start from given ones: leave out init, or use "
                "another method"
            )
        self.draws = draws
        self.module = self.build(Hypernet, model, generator=_shared(plan.generator))
        self._result: Generated | None = None
        self.set_optimizer(self.build(HypernetSGD, self.module))

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Give some draws batch-norm statistics of their own at the end of the run."""
        norms = (m for m in self.model.modules() if isinstance(m, _BatchNorm))
        if epoch + 1 < self.epochs or not any(norm.track_running_stats for norm in norms):
            return
        self._result = self.module.posterior().calibrated(
            lambda draws: recalibrate_each(self.model, draws, batches),
            self.draws,
            self.module.generator,
        )

    def posterior(self) -> Generated:
        """Return what has been learned."""
        return self.module.posterior() if self._result is None else self._result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training and the draws that were kept at its end."""
        members = [] if self._result is None else self._result.members
        return super().state_dict() | {"members": members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        super().load_state_dict(state)
        if state["members"]:
            self._result = self.module.posterior().with_members(state["members"])


def _shared(generator: torch.Generator) -> torch.Generator:
    """Return a generator that is the same in all processes: they share the latent of every batch."""
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    distributed.broadcast([seed])
    return torch.Generator(generator.device).manual_seed(int(seed))
