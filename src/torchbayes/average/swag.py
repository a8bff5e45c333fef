"""SWA-Gaussian: a Gaussian with the first two moments of the weights along an optimiser's path.

W. Maddox et al., A Simple Baseline for Bayesian Uncertainty in Deep Learning, NeurIPS 2019.

| symbol | here | from |
| --- | --- | --- |
| θ_SWA | the posterior's mean | Algorithm 1 |
| Σ_diag | mean of θ² − θ_SWA² | Algorithm 1 |
| D̂, K | the last `rank` deviations θ_i − θ̄_i | Algorithm 1 |
| θ_SWA + Σ_diag^½ z₁/√2 + D̂ z₂/√(2(K−1)) | `posterior().sample()` | Eq. (1) |

Deviations from the paper: the second moment is kept in its stable, centred form (`moments.py`); K is the
number of deviations so far while there are fewer than `rank`.
"""

from __future__ import annotations

from torch import nn

from torchbayes.average.gaussian_averager import GaussianAverager
from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params

__all__ = ["SWAG"]


@register(
    "swag", family="a Gaussian", posterior="LowRankGaussian",
    summary="a Gaussian with the mean and spread of the weights along the end of training",
    paper="Maddox et al. 2019; HWA without a mean field", start=0.75,
)  # fmt: skip
class SWAG(GaussianAverager):
    """A Gaussian over the weights from snapshots of plain training.

    Call `update()` at regular intervals (the paper: every epoch) at a constant, rather high learning
    rate once training has nearly converged. Buffers are those of the last snapshot.

    Args:
        model: The network that is being trained.
        rank: Number of deviations kept for the low-rank half of the covariance, each as large as the
            network; 0 gives the diagonal covariance (SWAG-Diagonal).
        params: What is random: names or patterns of weights (`"head.*"`), modules or parameters; all that
            require a gradient when the averager is made if None.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> swag = tb.SWAG(model, rank=0)
        >>> for value in (1.0, 3.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     swag.update()
        >>> q = swag.posterior()
        >>> q.mean()["weight"].item(), q.std()["weight"].item()
        (2.0, 1.0)
    """

    def __init__(self, model: nn.Module, rank: int = 20, *, params: Params | None = None) -> None:
        super().__init__(model, rank, params)
