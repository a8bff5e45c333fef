"""Hypernetwork posteriors as a method: generators trained on the likelihood, one latent per batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.core import distributed
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Generated
from torchbayes.posterior.latents import LATENTS
from torchbayes.predict.batchnorm import recalibrate_each
from torchbayes.train.method import Method, Plan, register
from torchbayes.variational.hypernet import Hypernet
from torchbayes.variational.hypernet_sgd import HypernetSGD

__all__ = ["HypernetMethod"]


@register
class HypernetMethod(Method):
    """A hypernetwork: weights generated from noise, trained on the likelihood with one draw per batch.

    In a network with batch norm the statistics of `draws` draws are re-estimated on the training data
    when the training ends, and predictions average over these draws.

    Args:
        lr: The learning rate of SGD with Nesterov momentum, the paper's optimiser. A step of the generators
            moves the weights by the rate times ‖a‖², about `hidden_dim`: with batch norm the paper's 0.1
            serves, without it a rate that is `hidden_dim` times smaller than a network's own.
        momentum: Its momentum.
        prior_precision: The precision δ of the prior N(0, 1/δ) on the generators and on the weights
            that are not generated, norm layers' excepted: `weight_decay = δ / train_size` (the paper:
            0.0005, δ = 25 on CIFAR-10).
        strategy: `all-in-one`, `block-wise` or `layer-wise`.
        latent: `normal`, `uniform` (−1 to 1), `uniform-positive` (0 to 1) or `half-normal`. With `normal` a
            network without batch norm, such as LeNet-5, hardly learns in its first epochs, or diverges. 0 to
            1 has the paper's lowest error of a draw; its draws differ less.
        latent_dim: The size of the noise z.
        hidden_dim: The hidden units of every generator.
        layers: The layers whose weights are generated. By default the convolutions in residual blocks;
            in a network without blocks all matrices and kernels but the last layer's.
        draws: The draws that get batch-norm statistics of their own.
    """

    name = "hypernet"
    family = "ensemble, masks, generator"
    posterior_kind = "Generated"
    summary = "small networks that generate the weights from noise"
    paper = "Ukai et al. 2019, Bayesian estimation and model averaging of CNNs by hypernetwork"

    module: Hypernet

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 0.005,
        momentum: float = 0.9,
        prior_precision: float = 1.0,
        strategy: str = "all-in-one",
        latent: str = "uniform-positive",
        latent_dim: int = 32,
        hidden_dim: int = 32,
        layers: list[str] | None = None,
        draws: int = 16,
    ) -> None:
        super().__init__(model, likelihood, plan)
        if latent not in LATENTS:
            raise ValueError(f"latent is {latent!r}: expected {' or '.join(LATENTS)}")
        if not lr > 0:
            raise ValueError(f"lr is {lr:g}: expected a learning rate above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum:g}: expected a number from 0 to below 1")
        if not prior_precision >= 0:
            raise ValueError(
                f"prior_precision is {prior_precision:g}: expected a number of at least 0"
            )
        if draws < 1:
            raise ValueError(f"draws is {draws}: expected at least 1")
        self.draws = draws
        self.module = Hypernet(
            model,
            strategy,
            LATENTS[latent],
            latent_dim,
            hidden_dim,
            layers=layers,
            generator=_shared(plan.generator),
        )
        self._result: Generated | None = None
        self.set_optimizer(
            HypernetSGD(self.module, lr, momentum, weight_decay=prior_precision / plan.train_size)
        )

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
        """What has been learned."""
        return self.module.posterior() if self._result is None else self._result

    def state_dict(self) -> dict[str, Any]:
        """The state of the training, and the draws that were kept at its end."""
        members = [] if self._result is None else self._result.members
        return super().state_dict() | {"members": members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        if state["members"]:
            self._result = self.module.posterior().with_members(state["members"])


def _shared(generator: torch.Generator) -> torch.Generator:
    """A generator that is the same in all processes: they share the latent of every batch."""
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    distributed.broadcast([seed])
    return torch.Generator(generator.device).manual_seed(int(seed))
