"""Hyperparameter weight averaging: SWA of a mean field's means and variances.

B. Karimi and P. Li, HWA: Hyperparameters Weight Averaging in Bayesian Neural Networks, AABI 2021.

| symbol | here | from |
| --- | --- | --- |
| μ_ℓ, σ | `meanfield.posterior()` | Algorithm 1, lines 6 and 7 |
| μ^HWA | the posterior's mean | Eq. (4), first line |
| σ^HWA, a variance | the posterior's std² | Eq. (4), second line, corrected |
| n_m | `len(hwa)` | Algorithm 1, line 9 |
| c, the cycle length | when you call `update()` | Algorithm 1, line 8 |
| low rank plus diagonal | `rank` | section 3.2, with SWAG's Eq. (1) |

Deviations from the paper. A snapshot is N(μᵢ, σᵢ²); their equal mixture has mean μ̄ and variance
V + S − μ̄², with V the mean of σᵢ² and S that of μᵢ²: this is what is kept. Eq. (4) as printed has no V,
and stores the variance where the second moment belongs, so that μ̄² is subtracted again each time: a
constant μ = 1 gives 0, −½, −1, … Line 11 adds μ to μ². Line 9 counts from the first iteration and so
overwrites the trained start with the first snapshot; here the count begins with the first `update()`.
Each weight has a μ and a σ of its own (section 4), not one per layer (section 3).
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from torchbayes.average.gaussian_averager import GaussianAverager
from torchbayes.core.declaration import register
from torchbayes.core.names import named_parameters
from torchbayes.posterior import Gaussian, Weights

__all__ = ["HWA"]


class _MeanField(Protocol):
    model: nn.Module

    def posterior(self) -> Gaussian: ...


@register(
    "hwa", family="a Gaussian", posterior="Gaussian", low=0.01,
    summary="Bayes by Backprop, its means and variances averaged along the end of training",
    paper="Karimi & Li 2021, HWA: Hyperparameters Weight Averaging in Bayesian Neural Networks",
)  # fmt: skip
class HWA(GaussianAverager):
    """A Gaussian over the weights from snapshots of a `MeanField` in training.

    Train the mean field until it has nearly converged, then continue with a cyclical learning rate (such
    as `Schedule("cyclic", cycles=…)`) and call `update()` at the end of each cycle. With σ = 0 it is SWAG.

    Args:
        meanfield: The mean field that is being trained.
        rank: Number of deviations of μ kept for a low-rank part of the covariance, each as large as the
            network; 0 gives the diagonal covariance.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(2, 1))
        >>> hwa = tb.HWA(net)
        >>> for _ in range(3):   # nothing moves: the result is the mean field itself
        ...     hwa.update()
        >>> bool((hwa.posterior().mean()["weight"] == net.posterior().mean()["weight"]).all())
        True
    """

    def __init__(self, meanfield: _MeanField, rank: int = 0) -> None:
        super().__init__(meanfield.model, rank)
        self._meanfield = meanfield

    def _current(self) -> tuple[Weights, Weights, Weights]:
        snapshot = self._meanfield.posterior()
        weights, std = snapshot.mean(), snapshot.std()
        # A weight without a σ is averaged too if it is trained, such as a norm layer's scale.
        trained = {
            n for n, p in named_parameters(self._network).items() if p.requires_grad
        } | std.keys()
        return (
            {name: weight for name, weight in weights.items() if name in trained},
            {name: sigma.square() for name, sigma in std.items()},
            {name: weight for name, weight in weights.items() if name not in trained},
        )
