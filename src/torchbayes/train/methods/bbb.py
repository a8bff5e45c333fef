"""Bayes by Backprop as a method: a mean field trained on the free energy, minibatch by minibatch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.batch import call
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Gaussian
from torchbayes.prior import GaussianPrior, Prior, ScaleMixturePrior
from torchbayes.train.method import Method, Plan, register
from torchbayes.train.methods.map import point_optimizer
from torchbayes.variational.estimators import (
    Estimator,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.meanfield import MeanField
from torchbayes.variational.objective import annealed_weight, blundell_weight, uniform_weight

__all__ = ["BbbMethod"]

_ESTIMATORS: dict[str, type[Estimator]] = {
    estimator.__name__: estimator for estimator in (shared_draw, local_reparameterisation, flipout)
}
_KL_SCHEDULES = ("uniform", "blundell", "linear")

# A posterior is called collapsed to the prior if the data have told it less than this many nats per
# weight and per example, and to a point if nine weights in ten have a σ below this share of their size.
_NATS_PER_WEIGHT, _NATS_PER_EXAMPLE = 1e-2, 1e-3
_POINT_STD, _POINT_SHARE = 1e-3, 0.9


@register
class BbbMethod(Method):
    """Bayes by Backprop: an independent Gaussian over every weight.

    The loss is mean NLL + weight · KL / train_size; `nll` and `kl`, both in nats per training example,
    are logged apart, the latter without its weight.

    Args:
        lr: The learning rate of μ and ρ.
        optimizer: `adam` or `sgd` (the paper's).
        momentum: SGD's momentum.
        estimator: `shared_draw` (the paper's, and the fastest), `flipout` or `local_reparameterisation`.
        prior: `gaussian` or `mixture`; in Python also a prior itself, such as an earlier task's
            posterior (`GaussianPrior.from_posterior`).
        prior_precision: The precision δ of the Gaussian prior N(0, 1/δ).
        pi: The share of the mixture's wide component.
        std1: Its standard deviation.
        std2: The standard deviation of the mixture's narrow component.
        init_std: The standard deviation that the posterior starts from.
        init: `model`, or `moped` to start a trained network with σ = init_std · |w|.
        mc_samples: The draws per update; their losses are averaged.
        kl_schedule: `uniform`; `blundell`, by which the first minibatches of each epoch pay most of the
            KL term; or `linear`, by which it rises from 0 at the start and is uniform afterwards.
        kl_warmup: The share of all updates that the linear rise takes.
    """

    name = "bbb"
    family = "a Gaussian"
    posterior_kind = "Gaussian"
    summary = "a Gaussian of its own over every weight, by backpropagation"
    paper = "Blundell et al. 2015, Weight Uncertainty in Neural Networks"

    module: MeanField

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        estimator: str = "shared_draw",
        prior: str | Prior = "gaussian",
        prior_precision: float = 1.0,
        pi: float = 0.5,
        std1: float = 1.0,
        std2: float = 0.0025,
        init_std: float = 0.01,
        init: str = "model",
        mc_samples: int = 1,
        kl_schedule: str = "linear",
        kl_warmup: float = 0.25,
    ) -> None:
        super().__init__(model, likelihood, plan)
        if estimator not in _ESTIMATORS:
            raise ValueError(f"estimator is {estimator!r}: expected {' or '.join(_ESTIMATORS)}")
        if kl_schedule not in _KL_SCHEDULES:
            raise ValueError(
                f"kl_schedule is {kl_schedule!r}: expected {' or '.join(_KL_SCHEDULES)}"
            )
        if not 0 <= kl_warmup <= 1:
            raise ValueError(f"kl_warmup is {kl_warmup:g}: expected a share of the updates, 0 to 1")
        if mc_samples < 1:
            raise ValueError(f"mc_samples is {mc_samples}: expected at least 1 draw")
        self.mc_samples, self.kl_schedule, self.kl_warmup = mc_samples, kl_schedule, kl_warmup
        self.module = MeanField(
            model,
            _prior(prior, prior_precision, pi, std1, std2),
            _ESTIMATORS[estimator],
            init_std=init_std,
            init=init,
            generator=plan.generator,
        )
        self.updates = 0
        self._warned = False
        self.set_optimizer(point_optimizer(self.module, optimizer, lr, momentum, weight_decay=0))

    @property
    def kl_weight(self) -> float:
        """The weight of KL / train_size in the next update's loss."""
        steps = self.plan.steps_per_epoch
        if self.kl_schedule == "blundell":
            return blundell_weight(self.updates % steps, steps)
        if self.kl_schedule == "linear":
            rise = math.ceil(self.kl_warmup * self.plan.epochs * steps)
            return annealed_weight(self.updates, max(1, rise))
        return uniform_weight(self.updates % steps, steps)

    def loss(self, inputs: Any, targets: Tensor) -> Tensor:
        """The minibatch's share of the free energy, per example."""
        nlls, kls = [], []
        for _ in range(self.mc_samples):
            nlls.append(self.likelihood.loss(call(self.module, inputs), targets))
            # The exact KL is the same for every draw, so one of them serves.
            if len(nlls) == self.mc_samples or not isinstance(self.module.prior, GaussianPrior):
                kls.append(self.module.kl())
        nll = torch.stack(nlls).mean()
        kl = torch.stack(kls).mean() / self.plan.train_size
        self.logs = {"nll": nll.detach(), "kl": kl.detach()}
        return nll + self.kl_weight * kl

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One update."""
        try:
            return super().step(closure)
        finally:
            self.updates += 1

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Look whether the posterior has collapsed, once the KL term counts in full."""
        late = 2 * (epoch + 1) >= self.plan.epochs and (
            self.kl_schedule != "linear" or self.kl_weight == 1
        )
        if late and not self._warned and "kl" in self.logs:
            complaint = self._collapse(float(self.logs["kl"]))
            if complaint is not None:
                self._warned = True
                warnings.warn(complaint, stacklevel=2)

    def _collapse(self, kl: float) -> str | None:
        """What is wrong with the posterior, if anything, given the KL per training example."""
        stds = self.module.std()
        count = sum(std.numel() for std in stds.values())
        per_weight = kl * self.plan.train_size / count
        if per_weight < _NATS_PER_WEIGHT and kl < _NATS_PER_EXAMPLE:
            return (
                f"the posterior has collapsed to the prior (KL {per_weight:.1g} nats per weight): it has "
                "learned nothing; try a smaller init_std, a longer kl_warmup or more epochs"
            )
        weights = dict(self.model.named_parameters())
        narrow = sum(int((std < _POINT_STD * weights[n].abs()).sum()) for n, std in stds.items())
        if narrow > _POINT_SHARE * count:
            return (
                f"the posterior has collapsed to a point ({narrow / count:.0%} of its weights have a "
                "standard deviation below 0.1 % of their size): its draws hardly differ; try a larger "
                "init_std or more epochs"
            )
        return None

    def posterior(self) -> Gaussian:
        """The Gaussian that has been learned."""
        return self.module.posterior()

    def state_dict(self) -> dict[str, Any]:
        """The mean field, its optimiser and the number of updates."""
        return super().state_dict() | {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self.updates = state["updates"]


def _prior(name: str | Prior, precision: float, pi: float, std1: float, std2: float) -> Prior:
    if isinstance(name, Prior):
        return name
    if name == "gaussian":
        return GaussianPrior(precision=precision)
    if name == "mixture":
        return ScaleMixturePrior(pi, std1, std2)
    raise ValueError(f"prior is {name!r}: expected gaussian or mixture")
