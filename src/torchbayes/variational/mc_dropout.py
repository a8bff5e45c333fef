"""Monte-Carlo dropout: the baseline of the VOGN paper.

Y. Gal and Z. Ghahramani, Dropout as a Bayesian Approximation, ICML 2016. As in the VOGN paper's baseline,
dropout comes after every convolution and linear (here also recurrent) layer except the last, before the
non-linearity, on single activations.

Deviation: in a draw for prediction one mask serves all examples (see `torchbayes.posterior.dropout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from torchbayes.core.declaration import register
from torchbayes.core.names import named_weights, unwrapped
from torchbayes.posterior import held_names
from torchbayes.posterior.dropout import DropoutPosterior, check_share, dropped_layers, hooked
from torchbayes.posterior.partial import described
from torchbayes.posterior.posterior import Weights, Wrapper, snapshot

__all__ = ["MCDropout"]


@register(
    "dropout", family="ensemble, masks, generator", posterior="DropoutPosterior",
    summary="one network with dropout left on, a mask for every draw",
    paper="Gal & Ghahramani 2016; the baseline of the VOGN paper",
)  # fmt: skip
class MCDropout(Wrapper, DropoutPosterior):
    """Any network with dropout after its convolutions and linear layers; itself a `Posterior`.

    In training mode it drops activations, with a separate mask for each example; in evaluation mode it is
    the plain network. Train it with any optimiser, then predict with `tb.predictive(model, net, inputs)`.
    The wrapped network's class and weight names do not change.

    Args:
        model: The network, whose weights are shared, not copied.
        p: Probability that an activation is dropped.
        layers: Names of the modules whose outputs are dropped; by default every convolution and linear
            layer except the last.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> net = tb.MCDropout(model, p=0.1)
        >>> net.layers
        ['0']
        >>> p = tb.predictive(model, net, torch.randn(5, 2), samples=10)
        >>> p.draws
        10
    """

    def __init__(
        self, model: nn.Module, p: float = 0.1, layers: Sequence[str] | None = None
    ) -> None:
        check_share(p)
        Wrapper.__init__(self, model)
        self.p, self.layers = p, dropped_layers(model, layers)
        self.model_name = type(unwrapped(model)).__name__
        self._changing = set(held_names(model, ()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network, with dropout in training mode."""
        if not self.training:
            return self.model(*args, **kwargs)
        with hooked(self.model, self.layers, lambda outputs, _: F.dropout(outputs, self.p)):
            return self.model(*args, **kwargs)

    def mean(self) -> Weights:
        """Return the network's current weights that are trained."""
        return snapshot(self.model, self._held())

    def _held(self) -> list[str]:
        return held_names(self.model, also=self._changing)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        own = named_weights(self.model)
        return {name: tuple(own[name].shape) for name in self._held()}

    def posterior(self) -> DropoutPosterior:
        """Return a copy of the current posterior."""
        held = self._held()
        weights, about = snapshot(self.model, held), described(self.model, held)
        return DropoutPosterior(weights, self.p, self.layers, **about)

    def save(self, path: Any) -> None:
        """Write `posterior()` to a file."""
        self.posterior().save(path)
