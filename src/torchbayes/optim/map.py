"""Maximum a posteriori and maximum likelihood: ordinary training, the baselines of every paper here.

Both minimise mean NLL − log p(w) / train_size. For a prior N(0, 1/δ) the second term is torch's L2 term,
`weight_decay = δ / train_size`, which Adam and SGD add to the gradient; the gradient of any other prior is
added here. Scales and shifts of norm layers have no prior.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from torchbayes.core.declaration import register
from torchbayes.core.names import named_parameters
from torchbayes.core.parameters import Params, norm_parameters, parameter_groups
from torchbayes.core.planned_rate import planned_rate
from torchbayes.optim.base import ModelOptimizer, check_number, check_train_size
from torchbayes.posterior import Point, snapshot
from torchbayes.posterior.partial import described
from torchbayes.prior import GaussianPrior, Prior, as_prior

__all__ = ["MAP", "MLE"]


@register(
    "map", family="one network", posterior="Point",
    summary="one network, the most probable under the prior",
    paper="the baseline of all five papers",
)  # fmt: skip
class MAP(ModelOptimizer):
    """Maximum a posteriori: Adam or SGD, with the prior in the right proportion to the data.

    Args:
        model: The network.
        lr: Learning rate.
        train_size: Number of training examples.
        prior: Prior of the weights outside norm layers: the precision δ of N(0, 1/δ), or a `Prior`. δ adds
            δ/(2·`train_size`)·‖w‖² to the mean loss: torch's `weight_decay = δ / train_size`.
        optimizer: `"adam"` or `"sgd"`.
        momentum: Momentum of SGD.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tb.MAP(model, train_size=100, prior=5.0)
        >>> model(torch.ones(8, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["weight_decay"], optimizer.posterior()
        (0.05, Point(3 weights of Linear))
    """

    usual_rate: ClassVar[float] = 1e-3
    """A rate to begin a search with: one that is given means another step than the rule's."""

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, train_size: int, prior: Prior | float = 1.0,
        optimizer: str = "adam", momentum: float = 0.9, params: Params | None = None,
    ) -> None:  # fmt: skip
        check_number("lr", lr, above=True)
        check_number("momentum", momentum, high=1.0)
        if optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer is {optimizer!r}: expected adam or sgd")
        self.prior = as_prior(prior)
        scalar = self.prior.scalar if isinstance(self.prior, GaussianPrior) else None
        self._decay = 0.0 if scalar is None else scalar / check_train_size(train_size)
        self._pulls = scalar is None
        self._inner: torch.optim.Optimizer | None = None
        groups = self._groups(model, params) if isinstance(model, nn.Module) else params
        defaults = {"lr": lr, "train_size": train_size}
        super().__init__(model, groups, defaults, generator=torch.Generator())  # never drawn from
        # It shares its groups and state with this optimiser.
        self._inner = (
            torch.optim.Adam(self.param_groups, lr=lr, fused=True)
            if optimizer == "adam"
            else torch.optim.SGD(self.param_groups, lr=lr, momentum=momentum, fused=True)
        )
        self.defaults |= self._inner.defaults
        self._inner.state = self.state

    def _groups(self, model: nn.Module, params: Params | None) -> list[dict[str, Any]]:
        """Move the parameters of norm layers, which have no prior, to groups of their own."""
        names, norms = (
            {id(p): name for name, p in named_parameters(model).items()}, norm_parameters(model)
        )  # fmt: skip
        found: list[dict[str, Any]] = []
        for group in parameter_groups(model, params):
            plain = [p for p in group["params"] if names[id(p)] not in norms]
            rest = [p for p in group["params"] if names[id(p)] in norms]
            for some, decay in ((plain, self._decay), (rest, 0.0)):
                if some:
                    found.append({"weight_decay": decay, **group, "params": some})
        return found

    @property
    def precision(self) -> float | None:
        """The precision δ of a prior N(0, 1/δ), which may be set at any time; None for another prior."""
        if self._pulls:
            return None
        decays = [g["weight_decay"] for g in self.param_groups if self._has_prior(g)]
        return decays[0] * self.param_groups[0]["train_size"] if decays else None

    @precision.setter
    def precision(self, value: float) -> None:
        if self._pulls:
            raise ValueError(
                f"the prior is a {type(self.prior).__name__}, which is no single precision: give MAP a number"
            )
        self.prior = as_prior(float(value))
        for group in self.param_groups:
            if self._has_prior(group):
                group["weight_decay"] = value / group["train_size"]

    def _has_prior(self, group: dict[str, Any]) -> bool:
        norms = norm_parameters(self.model)
        return any(self._names[id(p)] not in norms for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters; options in the group override the defaults."""
        if self._inner is None:
            super().add_param_group(param_group)
            return
        for group in self._groups(self.model, [param_group]):
            super().add_param_group(group)
            self._inner.add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Clears the gradients, computes the *mean* loss of a batch and its gradients, and
                returns the loss. Without it, the existing gradients are used.
        """
        return self._take(closure)

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        # Apart from `step`, around which torch puts the hooks of every class that defines one.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._pulls:
            self._add_prior()
        assert self._inner is not None
        self._inner.step()
        return loss

    def _add_prior(self) -> None:
        """Add −∇log p(w) / train_size to the gradients."""
        norms = norm_parameters(self.model)
        for group in self.param_groups:
            named = {self._names[id(p)]: p for p in group["params"] if p.grad is not None}
            named = {name: p for name, p in named.items() if name not in norms}
            weights = {name: p.detach() for name, p in named.items()}
            pull = self.prior.grad(weights) if weights else {}
            for name, p in named.items():
                p.grad.add_(pull[name], alpha=-1 / group["train_size"])

    def posterior(self) -> Point:
        """Return the weights as a point posterior."""
        held = self._held()
        return Point(snapshot(self.model, held), **described(self.model, held))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._inner is not None:
            self._inner.param_groups, self._inner.state = self.param_groups, self.state


@register(
    "mle", family="one network", posterior="Point",
    summary="one network, trained on the likelihood alone",
    paper="the baseline of the hypernetwork paper (Ensemble-MLE)",
)  # fmt: skip
class MLE(MAP):
    """Maximum likelihood: Adam or SGD without a prior.

    Args:
        model: The network.
        lr: Learning rate; 1e-3 if None. A wrapper that has a `rate` of its own, such as `MeanField`, then
            gets that one instead, with a short rise and a cosine to 0 over `steps`.
        steps: Number of updates that are planned; if None such a rate stays constant after its rise.
        optimizer: `"adam"` or `"sgd"`.
        momentum: Momentum of SGD.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> tb.MLE(torch.nn.Linear(2, 1)).param_groups[0]["weight_decay"]
        0.0
    """

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, steps: int | None = None,
        optimizer: str = "adam", momentum: float = 0.9, params: Params | None = None,
    ) -> None:  # fmt: skip
        self._plans = lr is None and hasattr(model, "rate")
        self.steps = steps
        super().__init__(
            model, getattr(model, "rate", 1e-3) if lr is None else lr, train_size=1, prior=0.0,
            optimizer=optimizer, momentum=momentum, params=params,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, of the planned length if no rate was given."""
        if not self._plans:
            return self._take(closure)
        given = [group["lr"] for group in self.param_groups]
        taken = self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        factor = planned_rate(taken, self.steps)
        try:
            for group, lr in zip(self.param_groups, given, strict=True):
                group["lr"] = lr * factor
            return self._take(closure)
        finally:
            for group, lr in zip(self.param_groups, given, strict=True):
                group["lr"] = lr
