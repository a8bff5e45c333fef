"""Stochastic weight averaging: the mean of the weights along another optimiser's path.

P. Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018.

| symbol | here | from |
| --- | --- | --- |
| w_SWA | the posterior's weights | Algorithm 1 |
| n_models | `len(swa)` | Algorithm 1 |
| c, the cycle length | when you call `update()` | Algorithm 1 |
"""

from __future__ import annotations

from torchbayes.average.averager import Averager
from torchbayes.core.declaration import register
from torchbayes.posterior import Point

__all__ = ["SWA"]


@register(
    "swa", family="one network", posterior="Point",
    summary="one network, the mean of the weights along the end of training",
    paper="Izmailov et al. 2018; what the HWA paper starts from", start=0.75,
)  # fmt: skip
class SWA(Averager[Point]):
    """The running mean of a network's weights.

    Call `update()` at the end of every learning-rate cycle, or every epoch at a constant rate, once
    training has nearly converged. Buffers are those of the last snapshot.

    Args:
        model: The network that is being trained.
        params: What is averaged: names or patterns of weights (`"head.*"`), modules or parameters; all that
            require a gradient when the averager is made if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> swa = tb.SWA(model)
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     swa.update()
        >>> swa.posterior().mean()["weight"].item()
        3.0
    """

    def _posterior(self) -> Point:
        return Point(self.mean(), **self._about())
