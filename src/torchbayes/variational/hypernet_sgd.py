"""SGD for a hypernetwork that never makes the gradient of its output layers.

With one latent per batch the gradient of W2 is the outer product g·aᵀ of the gradient g of the generated
weight and the hidden activation a = relu(W1·z). It is made in pieces that stay in the cache, each used for
the update at once. What a step reads and writes of W2 and of its momentum is then the least there can be,
and no memory is needed beside them.

The network's own parameters hold the draw, so that its backward pass is that of the plain network; their
gradients are all that this optimiser needs. Clipping, averaging over processes and the unscaling of mixed
precision work on them, and so on the gradient with respect to the generated weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.variational.hypernet import Hypernet

__all__ = ["HypernetSGD", "rank_one_step_"]

# Elements of W2 that are updated at a time: the piece, its momentum and its gradient fit in the cache.
_PIECE = 1 << 18


def rank_one_step_(
    weight: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    activation: Tensor,
    scratch: Tensor,
    settings: dict[str, Any],
) -> Tensor:
    """One SGD step on W with the gradient g·aᵀ, in place; gives Wᵀ·g of before the step.

    Args:
        weight: W, (rows, h).
        momentum: Its momentum, of the same shape; empty if there is none.
        gradient: g, (rows,).
        activation: a, (h,).
        scratch: (some rows, h): the memory for a piece of the gradient.
        settings: Of `torch._fused_sgd_`.
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
        lr: The learning rate (the paper: 0.1).
        momentum: The momentum (the paper: 0.9).
        nesterov: Whether it is Nesterov's (the paper's is).
        weight_decay: λ of λ/2·‖θ‖² on W1, W2 and all other weights but norm layers' (the paper: 0.0005).

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import mlp
        >>> net = tb.Hypernet(mlp(4, hidden=(8, 8)))
        >>> optimizer = tb.variational.HypernetSGD(net, lr=0.1)
        >>> torch.nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.arange(5)).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        net: Hypernet,
        lr: float = 0.1,
        momentum: float = 0.9,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        if not isinstance(net, Hypernet):
            raise TypeError(
                f"HypernetSGD is for a Hypernet, got a {type(net).__name__}: wrap the network first"
            )
        norms = norm_parameters(net.model)
        named = trainable(net.model)
        groups = [
            {
                "params": [p for n, p in named.items() if n not in norms],
                "weight_decay": weight_decay,
            },
            {"params": [p for n, p in named.items() if n in norms], "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=lr,
            momentum=momentum,
            nesterov=nesterov and momentum > 0,
            fused=True,
        )
        # GradScaler must unscale the gradients by itself: what is fused here is not torch's own step.
        self._step_supports_amp_scaling = False
        self.net = net
        net.in_place, net.drawn = True, {}
        self._scratch: dict[tuple[Any, ...], Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the next call of the network draws anew."""
        super().zero_grad(set_to_none)
        self.net.drawn = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; the next call of the network draws anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators = {
            own: (name, first, second) for name, own, first, second in self.net._triples()
        }
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
                f"the gradient of {name!r} is not of a draw: call zero_grad(), the network and backward() "
                "before step()"
            )
        latent, activation = self.net.drawn[name]
        state = self.state[own]
        moving = group["momentum"] > 0
        if moving and "second" not in state:
            state["first"], state["second"] = torch.zeros_like(first), torch.zeros_like(second)
        settings = {
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "lr": float(group["lr"]),
            "dampening": 0.0,
            "nesterov": group["nesterov"],
            "maximize": False,
            "is_first_step": False,
        }
        matrix = second.view(-1, len(activation))
        assert own.grad is not None
        back = rank_one_step_(
            matrix,
            state["second"].view_as(matrix) if moving else matrix[:0],
            own.grad.reshape(-1),
            activation,
            self._piece(matrix),
            settings,
        )
        gradient = torch.outer(back * (activation > 0), latent)
        torch._fused_sgd_([first], [gradient], [state["first"]] if moving else [], **settings)

    def _piece(self, matrix: Tensor) -> Tensor:
        """Memory for a piece of the gradient, kept from step to step."""
        rows = min(len(matrix), max(1, _PIECE // matrix.shape[1]))
        key = (matrix.shape[1], matrix.dtype, matrix.device)
        kept = self._scratch.get(key)
        if kept is None or len(kept) < rows:
            kept = self._scratch[key] = matrix.new_empty(rows, matrix.shape[1])
        return kept[:rows]
