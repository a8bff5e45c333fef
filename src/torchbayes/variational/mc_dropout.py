"""Monte-Carlo dropout: the baseline of the VOGN paper.

Y. Gal and Z. Ghahramani, Dropout as a Bayesian Approximation, ICML 2016. The dropout is the network's own. In
a network without any it comes, as in the VOGN paper's baseline, after every convolution and linear (here also
recurrent) layer except the last, before the non-linearity, on single activations.

Deviation: in a draw for prediction one mask serves all examples (see `torchbayes.posterior.dropout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchbayes.core.declaration import register
from torchbayes.core.names import named_modules, named_weights, unwrapped
from torchbayes.posterior import held_names
from torchbayes.posterior.dropout import (
    DropoutPosterior,
    OwnDropout,
    check_share,
    dropped_layers,
    hooked,
    own_dropout_layers,
)
from torchbayes.posterior.partial import described
from torchbayes.posterior.posterior import Weights, Wrapper, snapshot

__all__ = ["MCDropout"]

# Dropping this share of its inputs gives a unit noise of 0.17 times its size, as much as VOGN's bound does.
_SHARE = 0.03


@register(
    "dropout", family="ensemble, masks, generator", posterior="DropoutPosterior",
    summary="one network with dropout left on, a mask for every draw",
    paper="Gal & Ghahramani 2016; the baseline of the VOGN paper",
)  # fmt: skip
class MCDropout(Wrapper, DropoutPosterior):
    """Any network with dropout that stays on in prediction; itself a `Posterior`.

    A network that has dropout of its own keeps it, and nothing is added: `nn.Dropout` and its relatives,
    `nn.MultiheadAttention(dropout=…)`, and `F.dropout(…, training=self.training)` in its code. A network
    without any gets dropout after its convolutions and linear layers.

    In training mode activations are dropped, with a separate mask for each example; in evaluation mode it is
    the plain network. Train it with any optimiser, or not at all if the network was trained with dropout, and
    predict with `tb.predictive(model, net, inputs)`. The wrapped network's class and weight names do not
    change, and its batch norm uses its running statistics in prediction.

    Args:
        model: The network, whose weights are shared, not copied.
        p: Probability that an activation is dropped; if None, that of the network's own dropout, and 0.03
            where dropout is added.
        layers: Names of the modules whose outputs are dropped instead; `"own"` for the network's own dropout
            where it has no module for it, only calls of `F.dropout`.

    Attributes:
        layers: The names of the modules.
        own: Whether these are the network's own dropout.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> net = tb.MCDropout(model, p=0.1)
        >>> net.layers, net.own
        (['0'], False)
        >>> p = tb.predictive(model, net, torch.randn(5, 2), samples=10)
        >>> p.draws
        10
    """

    def __init__(
        self, model: nn.Module, p: float | None = None, layers: Sequence[str] | str | None = None
    ) -> None:
        if p is not None:
            check_share(p)
        if isinstance(layers, str) and layers != "own":
            raise ValueError(f"layers is {layers!r}: expected a list of modules' names, or 'own'")
        Wrapper.__init__(self, model)
        mine = own_dropout_layers(model) if layers is None or layers == "own" else []
        self.own = layers == "own" or bool(mine)
        if isinstance(layers, str):
            layers = None
        self.layers = mine if self.own else dropped_layers(model, layers)
        self.p = p if self.own or p is not None else self._named_share()
        self.model_name = type(unwrapped(model)).__name__
        self._changing = set(held_names(model, ()))

    def _modules_of(self, layers: Sequence[str]) -> list[nn.Module]:
        modules = {name: module for name, _, module in named_modules(self.model)}
        return [modules[name] for name in layers]

    def _named_share(self) -> float:
        """Return the probability of dropping where none is given: 0.03, or that of dropout layers."""
        shares = {
            m.p if isinstance(m, _DropoutNd) else _SHARE for m in self._modules_of(self.layers)
        }
        if len(shares) > 1:
            raise ValueError(
                f"the modules in layers drop with different probabilities, {sorted(shares)}: give p"
            )
        return check_share(shares.pop())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network, with dropout in training mode."""
        if not self.training or (self.own and self.p is None):
            return self.model(*args, **kwargs)
        if self.own:
            with OwnDropout(self.p):
                return self.model(*args, **kwargs)
        p = check_share(self.p)
        pairs = zip(self.layers, self._modules_of(self.layers), strict=True)
        added = [name for name, module in pairs if not isinstance(module, _DropoutNd)]
        with hooked(self.model, added, lambda outputs, _: F.dropout(outputs, p)):
            return self.model(*args, **kwargs)

    def mean(self) -> Weights:
        """Return the network's current weights that are trained."""
        return snapshot(self.model, self._held())

    def _held(self) -> list[str]:
        return held_names(self.model, also=self._changing)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        own = named_weights(self.model)
        return {name: tuple(own[name].shape) for name in self._held()}

    def extra_repr(self) -> str:
        """Summarise where and how often activations are dropped."""
        share = "" if self.p is None else f" with p={self.p:g}"
        whose = "its own dropout" if self.own else f"dropout after {', '.join(self.layers)}"
        return f"{whose}{share}"

    def posterior(self) -> DropoutPosterior:
        """Return a copy of the current posterior."""
        held = self._held()
        weights, about = snapshot(self.model, held), described(self.model, held)
        return DropoutPosterior(weights, self.p, self.layers, own=self.own, **about)

    def save(self, path: Any) -> None:
        """Write `posterior()` to a file."""
        self.posterior().save(path)
