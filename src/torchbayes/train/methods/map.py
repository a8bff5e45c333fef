"""Maximum likelihood and maximum a posteriori: ordinary training, the baselines of every paper here."""

from __future__ import annotations

import torch
from torch import nn

from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Point, snapshot
from torchbayes.train.method import Method, Plan, register

__all__ = ["MapMethod", "MleMethod", "point_optimizer"]


def point_optimizer(
    module: nn.Module, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Adam or SGD in its fused form, with `weight_decay` as an L2 term on all but norm layers.

    Args:
        module: What to train.
        name: `adam` or `sgd`.
        lr: The learning rate.
        momentum: SGD's momentum.
        weight_decay: λ of the term λ/2·‖w‖² added to the mean loss.
    """
    if not lr > 0:
        raise ValueError(f"lr is {lr:g}: expected a learning rate above 0")
    norms = norm_parameters(module)
    named = trainable(module)
    groups = [
        {"params": [p for n, p in named.items() if n not in norms], "weight_decay": weight_decay},
        {"params": [p for n, p in named.items() if n in norms], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adam":
        return torch.optim.Adam(groups, lr=lr, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
    raise ValueError(f"optimizer is {name!r}: expected adam or sgd")


@register
class MapMethod(Method):
    """Maximum a posteriori under a Gaussian prior: the best single network.

    Args:
        lr: The learning rate.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
        prior_precision: The precision δ of the prior N(0, 1/δ) on every weight except norm layers'.
            Adds δ/(2·train_size)·‖w‖² to the mean loss: torch's `weight_decay = δ / train_size`.
    """

    name = "map"
    family = "one network"
    posterior_kind = "Point"
    summary = "one network, the most probable under a Gaussian prior"
    paper = "the baseline of all five papers"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        prior_precision: float = 1.0,
    ) -> None:
        super().__init__(model, likelihood, plan)
        if not prior_precision >= 0:
            raise ValueError(
                f"prior_precision is {prior_precision:g}: expected a number of at least 0"
            )
        decay = prior_precision / plan.train_size
        self.set_optimizer(point_optimizer(self.module, optimizer, lr, momentum, decay))

    def posterior(self) -> Point:
        """The weights, with all mass on them."""
        return Point(snapshot(self.model), model_name=type(self.model).__name__)


@register
class MleMethod(MapMethod):
    """Maximum likelihood: no prior at all.

    Args:
        lr: The learning rate.
        optimizer: `adam` or `sgd`.
        momentum: SGD's momentum.
    """

    name = "mle"
    family = "one network"
    posterior_kind = "Point"
    summary = "one network, trained on the likelihood alone"
    paper = "the baseline of the hypernetwork paper (Ensemble-MLE)"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
    ) -> None:
        super().__init__(
            model,
            likelihood,
            plan,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            prior_precision=0,
        )
