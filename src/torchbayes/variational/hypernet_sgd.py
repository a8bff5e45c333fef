"""SGD for a hypernetwork that never forms the gradient of its output layers.

With one latent per batch the gradient of W2 is the outer product g·aᵀ of the gradient g of the generated
weight and the hidden activation a = relu(W1·z). It is computed in pieces that stay in the cache, and each is
used for the update at once. A step then reads and writes W2 and its momentum as little as possible, and
needs no other memory. Of a large W2 it leaves the hidden units with a = 0 for later (`hidden_units`). Whoever
uses W2 or its momentum finds them after all steps (`pending`). A tensor on the same memory that was made
before a step, such as `p.data`, `p.detach()` or an entry of a state dict, may lack the step until then.

The network's own parameters hold the draw, so that its backward pass is that of the plain network; their
gradients are all that this optimiser needs. Clipping, averaging over processes and the unscaling of mixed
precision act on them, and so on the gradient with respect to the generated weights.

Without a `lr` the gradient g of a generated weight, or of one that is not generated, is divided by the root
of its mean square v, as in Adam, and the outer product by ‖a‖², so that the weights of every draw move by the
same length whatever the scale of the loss and of the activation:

    W2 ← W2 − α_t (1 − β) momentum of g/√v aᵀ/‖a‖²,    v ← 0.999 v + 0.001 g²  (debiased)

W1's gradient is divided by the root of its own mean square. α_t is 0.01 times √(8/f), at most 1, for a fan-in
f (of W1 the size of the latent), times a rise over the first twentieth of `steps` and half a cosine to 0 at
their end, as in `IVON`. The prior's pull on W2 is divided by ‖a‖² and the mean of √v. A draw with nearly all
hidden units off would move W2 without bounds, so ‖a‖² counts as at least a hundredth of their number.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchbayes.core.fan_in import fan_ins, rate_share
from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.core.planned_rate import planned_rate
from torchbayes.core.workspace import Workspace
from torchbayes.prior import Prior, as_prior
from torchbayes.variational.hidden_units import HiddenUnits, fits
from torchbayes.variational.hypernet import Hypernet

__all__ = ["HypernetSGD", "bounded_gradient", "rank_one_step_"]

# Elements of W2 that are updated at once: the piece, its momentum and its gradient fit in the cache.
_PIECE = 1 << 18
# Generated weights of a tensor from which W2 is updated unit by unit. Of a smaller one pieces fit the cache,
# and a call for every unit would take longer than the update.
_BY_UNIT = 1 << 16
# Without a given rate: its largest value, the decay of squares, and what keeps 0/0 finite.
_RATE, _SQUARES, _TINY = 1e-2, 0.999, 1e-15
# And the least mean square of the hidden units, which counts if a draw has less: a million draws of new
# generators with 32 units and the default latents had 0.012 and more.
_LEAST_ACTIVE = 1e-2


def rank_one_step_(
    weight: Tensor, momentum: Tensor, gradient: Tensor, activation: Tensor, scratch: Tensor,
    settings: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Take one SGD step on W with the gradient a·gᵀ, in place; return W·g from before the step.

    Args:
        weight: W, (h, n).
        momentum: Momentum of W, of the same shape; empty if there is none.
        gradient: g, (n,).
        activation: a, (h,).
        scratch: Memory for a piece of the gradient.
        settings: Arguments of `torch._fused_sgd_`.
    """
    back = torch.zeros_like(activation)
    (h, n), size, decay = weight.shape, len(scratch), settings["weight_decay"]
    if isinstance(decay, Tensor):  # of an accelerator: torch's step would look at it
        settings = {**settings, "weight_decay": 0.0}
    rows = max(1, size // n)
    for unit, start in product(range(0, h, rows), range(0, n, size)):
        units, entries = slice(unit, unit + rows), slice(start, start + size)
        w, a, g = weight[units, entries], activation[units], gradient[entries]
        v = [momentum[units, entries]] if len(momentum) else []
        back[units].addmv_(w, g)
        piece = torch.outer(a, g, out=scratch[: w.numel()].view(w.shape))
        if isinstance(decay, Tensor):
            piece.addcmul_(w, decay, value=-1 if settings["maximize"] else 1)
        torch._fused_sgd_([w], [piece], v, **settings)
    return back


def bounded_gradient(
    bounded: Tensor, square: Tensor, g: Tensor,
    *, keep: float, debias: float, share: float, tiny: float,
) -> list[Tensor]:  # fmt: skip
    """Write g/√v times a share to `bounded`, v being the debiased mean square; return Σ√v."""
    square.lerp_(g.square(), 1 - keep)
    root = (square * debias).sqrt_().add_(tiny)
    torch.div(g, root, out=bounded).mul_(share)
    return [root.sum()]


class HypernetSGD(torch.optim.SGD):
    """SGD with momentum on the generators of a `Hypernet` and on the weights that it does not generate.

    With a given `lr` it is equal to `torch.optim.SGD(net.parameters(), …)` up to rounding, with two
    differences: one draw is kept from `zero_grad()` to `step()`, so that a batch in several pieces has one
    draw, and weight decay leaves norm layers alone. Each parameter group holds the network's own parameters;
    a generated one stands for its generator.

    Args:
        net: The hypernetwork. From now on it draws into the network's own parameters.
        lr: Learning rate; if None steps of bounded length, by the rule of the module's docstring. A step with
            a given rate moves the weights by the rate times ‖a‖², about `hidden_dim`: with batch norm use
            the paper's 0.1, without it a rate `hidden_dim` times smaller than the network's own.
        momentum: Momentum (the paper: 0.9).
        train_size: Number of training examples.
        steps: Number of updates that are planned, for the rate without `lr`; if None it stays constant.
        prior: Precision δ of the prior N(0, 1/δ) on the generators and on the weights that are not
            generated, except norm layers': `weight_decay = δ / train_size` (the paper: 0.0005, δ = 25 on
            CIFAR-10).
        nesterov: Whether the momentum is Nesterov's (as in the paper).

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import mlp
        >>> from torchbayes.variational import HypernetSGD
        >>> net = tb.Hypernet(mlp(4, hidden=(8, 8)))
        >>> optimizer = HypernetSGD(net, lr=0.1, train_size=100)
        >>> torch.nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.arange(5)).backward()
        >>> optimizer.step()
    """

    usual_rate: ClassVar[float] = 5e-3
    """A rate to begin a search with: one that is given means another step than the rule's."""

    def __init__(
        self,
        net: Hypernet,
        lr: float | None = None,
        momentum: float = 0.9,
        *,
        train_size: int,
        steps: int | None = None,
        prior: Prior | float = 1.0,
        nesterov: bool = True,
    ) -> None:
        self._planned, self.steps = lr is None, steps
        lr = _RATE if lr is None else lr
        if not lr > 0:
            raise ValueError(f"lr is {lr:g}: expected a learning rate above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum:g}: expected a number from 0 to below 1")
        precision = getattr(as_prior(prior), "scalar", None)
        if precision is None:
            raise TypeError(
                f"prior is {prior!r}: the weights of generators have other names than the network's, so give "
                "a number, the precision of N(0, 1/precision)"
            )
        if not isinstance(net, Hypernet):
            raise TypeError(
                f"HypernetSGD is for a Hypernet, got a {type(net).__name__}: wrap the network first"
            )
        norms, named = norm_parameters(net.model), trainable(net.model)
        groups = [
            {
                "params": [p for n, p in named.items() if (n in norms) is is_norm],
                "weight_decay": decay,
            }
            for is_norm, decay in ((False, precision / train_size), (True, 0.0))
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, fused=True,
        )  # fmt: skip
        # Of all weights: a group with some that are frozen now may be added later.
        self._shares = {key: rate_share(fan_in) for key, fan_in in fan_ins(net.model).items()}
        # GradScaler must unscale the gradients itself: what is fused here is not torch's own step.
        self._step_supports_amp_scaling = False
        self.net = net
        net.in_place, net.drawn = True, {}
        self._space = Workspace()
        # From the start, so that a first draw rounds as all others do.
        net.units = {
            name: HiddenUnits(self._space)
            for name, own, _, second in net._triples() if momentum > 0 and _is_large(own, second)
        }  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the next call of the network draws again."""
        super().zero_grad(set_to_none)
        self.net.drawn = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once; the next call of the network draws again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._planned:
            self._take()
            return loss
        given = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        try:
            for group in self.param_groups:
                self._plan(group)
            self._take()
        finally:
            for group, (lr, decay) in zip(self.param_groups, given, strict=True):
                group["lr"], group["weight_decay"] = lr, decay
            for p, gradient in gradients.items():
                p.grad = gradient
        return loss

    def _plan(self, group: dict[str, Any]) -> None:
        """Divide a group's gradients by their mean size, and set the rate of this step."""
        generated = set(self.net._current()[0])
        taken = group["taken"] = group.get("taken", 0) + 1
        group["lr"] *= planned_rate(taken, self.steps) * (1 - group["momentum"])
        for p in group["params"]:
            if p.grad is None:
                continue
            state, share = self.state[p], self._shares[id(p)]
            sign = -1 if group["maximize"] else 1
            pulled = p.grad if p in generated else p.grad + sign * group["weight_decay"] * p
            bounded = self._space.twin("bounded", p)
            total = self._bound(bounded, state, "square", pulled, share)
            if p in generated:  # a layer without gradients would be pulled without bounds
                pull = group["weight_decay"] * share * p.numel()
                if isinstance(total, Tensor) and total.device.type != "cpu":  # without a look at it
                    state["pull"] = (pull / total).clamp_max_(1.0)
                else:
                    state["pull"] = min(1.0, pull / float(total))
            p.grad = bounded
        group["weight_decay"] = 0.0

    def _take(self) -> None:
        """Take the step, for gradients and rates as they are now."""
        generators = {own: (name, w1, w2) for name, own, w1, w2 in self.net._triples()}
        held: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for own in group["params"]:
                if own in generators and own.grad is not None:
                    held[own] = own.grad
                    self._update(own, *generators[own], group)
                    own.grad = None  # torch's own step is for the others
        super().step()
        for own, gradient in held.items():
            own.grad = gradient
        self.net.drawn = {}

    def _update(
        self, own: Tensor, name: str, first: Tensor, second: Tensor, group: dict[str, Any]
    ) -> None:
        if name not in self.net.drawn:
            raise RuntimeError(
                f"the gradient of {name!r} does not belong to a draw: call zero_grad(), the network and "
                "backward() before step()"
            )
        latent, activation = self.net.drawn[name]
        state = self.state[own]
        moving = group["momentum"] > 0
        if moving and "second" not in state:
            state["first"], state["second"] = torch.zeros_like(first), torch.zeros_like(second)
        settings = {
            name: group[name] for name in ("weight_decay", "momentum", "nesterov", "maximize")
        }
        settings |= {"lr": float(group["lr"]), "dampening": 0.0, "is_first_step": False}
        assert own.grad is not None
        size: float | Tensor = 1.0
        if self._planned:
            size = activation.square().sum().clamp_min(_LEAST_ACTIVE * len(activation))
            size = float(size) if size.device.type == "cpu" else size
            settings["weight_decay"] = state["pull"] / size
        if moving and _is_large(own, second):
            units = self.net.units.setdefault(name, HiddenUnits(self._space))
            back = units.step(
                second, state["second"], own.grad, (-activation if group["maximize"] else activation) / size,
                alpha=settings["lr"], mu=settings["momentum"], decay=settings["weight_decay"],
                nesterov=settings["nesterov"],
            )  # fmt: skip
        else:
            self.net.units.pop(name, None)
            if not second.is_contiguous():
                second.data = second.contiguous()
            matrix = second.view(len(activation), -1)
            if moving:
                state["second"] = state["second"].contiguous()
            velocity = state["second"].view_as(matrix) if moving else matrix[:0]
            piece = self._space.get("piece", (min(matrix.numel(), _PIECE),), matrix)
            back = rank_one_step_(
                matrix, velocity, own.grad.reshape(-1), activation / size, piece, settings
            )
        gradient = torch.outer(back * (activation > 0), latent)
        if self._planned:
            share = rate_share(len(latent))
            self._bound(gradient, state, "first_square", gradient, share)
            settings["weight_decay"] = 0.0
        torch._fused_sgd_([first], [gradient], [state["first"]] if moving else [], **settings)

    def _bound(
        self, bounded: Tensor, state: dict[str, Any], name: str, gradient: Tensor, share: float
    ) -> float | Tensor:
        """Write g/√v, times a share, after adding g to its mean square in a state; return Σ√v."""
        if name not in state:
            state[name], state[f"{name}s"] = torch.zeros_like(gradient), 0
        state[f"{name}s"] += 1
        debias = 1 / (1 - _SQUARES ** state[f"{name}s"])
        sums = self._space.apply(
            bounded_gradient, [[bounded], [state[name]]], [[gradient]],
            keep=_SQUARES, debias=debias, share=share, tiny=_TINY,
        )  # fmt: skip
        assert sums is not None
        total: float | Tensor = sums[0]
        return total


def _is_large(own: Tensor, second: Tensor) -> bool:
    """Whether W2 is updated unit by unit."""
    return own.numel() >= _BY_UNIT and fits(second)
