"""SGD for a hypernetwork that never forms the gradient of its output layers.

With one latent per batch the gradient of W2 is the outer product g·aᵀ of the gradient g of the generated
weight and the hidden activation a = relu(W1·z). It is computed in pieces that stay in the cache, and each is
used for the update at once. A step then reads and writes W2 and its momentum as little as possible, and
needs no other memory.

The network's own parameters hold the draw, so that its backward pass is that of the plain network; their
gradients are all that this optimiser needs. Clipping, averaging over processes and the unscaling of mixed
precision act on them, and so on the gradient with respect to the generated weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.core.workspace import Workspace
from torchbayes.prior import Prior, as_prior
from torchbayes.variational.hypernet import Hypernet

__all__ = ["HypernetSGD", "rank_one_step_"]

# Elements of W2 that are updated at once: the piece, its momentum and its gradient fit in the cache.
_PIECE = 1 << 18


def rank_one_step_(
    weight: Tensor, momentum: Tensor, gradient: Tensor, activation: Tensor, scratch: Tensor,
    settings: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Take one SGD step on W with the gradient g·aᵀ, in place; return Wᵀ·g from before the step.

    Args:
        weight: W, (rows, h).
        momentum: Momentum of W, of the same shape; empty if there is none.
        gradient: g, (rows,).
        activation: a, (h,).
        scratch: Memory for a piece of the gradient, (some rows, h).
        settings: Arguments of `torch._fused_sgd_`.
    """
    back = torch.zeros_like(activation)
    size = len(scratch)
    for start in range(0, len(weight), size):
        w, g = weight[start : start + size], gradient[start : start + size]
        v = [momentum[start : start + size]] if len(momentum) else []
        back.addmv_(w.t(), g)
        piece = torch.outer(g, activation, out=scratch[: len(w)])
        torch._fused_sgd_([w], [piece], v, **settings)
    return back


class HypernetSGD(torch.optim.SGD):
    """SGD with momentum on the generators of a `Hypernet` and on the weights that it does not generate.

    Equal to `torch.optim.SGD(net.parameters(), …)` up to rounding, with two differences: one draw is
    kept from `zero_grad()` to `step()`, so that a batch in several pieces has one draw, and weight decay
    leaves norm layers alone. Each parameter group holds the network's own parameters; a generated one
    stands for its generator.

    Args:
        net: The hypernetwork. From now on it draws into the network's own parameters.
        lr: Learning rate. A step of the generators moves the weights by the rate times ‖a‖², about
            `hidden_dim`: with batch norm use the paper's 0.1, without it a rate `hidden_dim` times smaller
            than the network's own.
        momentum: Momentum (the paper: 0.9).
        train_size: Number of training examples.
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

    def __init__(
        self,
        net: Hypernet,
        lr: float = 0.005,
        momentum: float = 0.9,
        *,
        train_size: int,
        prior: Prior | float = 1.0,
        nesterov: bool = True,
    ) -> None:
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
        # GradScaler must unscale the gradients itself: what is fused here is not torch's own step.
        self._step_supports_amp_scaling = False
        self.net = net
        net.in_place, net.drawn = True, {}
        self._space = Workspace()

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
        return loss

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
        matrix = second.view(-1, len(activation))
        velocity = state["second"].view_as(matrix) if moving else matrix[:0]
        rows = min(len(matrix), max(1, _PIECE // matrix.shape[1]))
        piece = self._space.get("piece", (rows, matrix.shape[1]), matrix)
        assert own.grad is not None
        back = rank_one_step_(matrix, velocity, own.grad.reshape(-1), activation, piece, settings)
        gradient = torch.outer(back * (activation > 0), latent)
        torch._fused_sgd_([first], [gradient], [state["first"]] if moving else [], **settings)
