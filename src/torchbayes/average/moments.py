"""Running moments of a sequence of weights, one snapshot at a time: the arithmetic of SWA, SWAG and HWA.

Izmailov et al. 2018 (SWA, Algorithm 1); Maddox et al. 2019 (SWAG, Algorithm 1 and Eq. 1); Karimi and Li
2021 (HWA, Eq. 4). Lists have one tensor per weight; n is the number of snapshots before this one.

| symbol | here | from |
| --- | --- | --- |
| μ̄ (θ_SWA, μ^HWA) | `mean` | SWA Algorithm 1; HWA Eq. (4), first line |
| S − μ̄² (Σ_diag) | `spread` | SWAG Algorithm 1; HWA Eq. (4), second line, corrected |
| V, the mean of σ² | `within` | missing in HWA Eq. (4) |
| D̂, of columns θ_r − θ̄_r | `columns` | SWAG Algorithm 1 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

__all__ = ["diagonal_std", "low_rank_factor", "update_mean", "update_spread"]

# Of torch.optim.swa_utils only the running mean is of use: AveragedModel holds a deep copy of the whole
# module, keeps no second moment to go with the mean, and averages bfloat16 weights in bfloat16.
_running_mean = get_swa_multi_avg_fn()


def update_mean(mean: list[Tensor], new: list[Tensor], n: int) -> None:
    """Update μ̄ ← (n μ̄ + μ)/(n + 1) in place: SWA Algorithm 1, HWA Eq. (4) first line."""
    _running_mean(mean, new, n)


def update_spread(spread: list[Tensor], mean: list[Tensor], new: list[Tensor], n: int) -> None:
    """Update S − μ̄² of n snapshots to that of n + 1, in place; call it before `update_mean`.

    With δ = μ − μ̄ the new value is n/(n+1) · (old + δ²/(n+1)) (Welford). Nothing is subtracted, so it
    is never negative and does not lose the digits that S and μ̄² have in common.
    """
    squares = torch._foreach_sub(new, mean)
    torch._foreach_mul_(squares, squares)
    torch._foreach_add_(spread, squares, alpha=1 / (n + 1))
    torch._foreach_mul_(spread, n / (n + 1))


def diagonal_std(within: Tensor | None, spread: Tensor, *, low_rank: bool) -> Tensor:
    """Return the square root of the covariance's diagonal part.

    Alone, the diagonal is V + (S − μ̄²). With a low-rank part, each of the two holds half the spread:
    ½ Σ_diag with Σ_diag = 2V + (S − μ̄²) (SWAG Eq. 1), so that V, which is not in D̂, stays whole.
    """
    variance = 0.5 * spread if low_rank else spread.clone()
    if within is not None:
        variance += within
    return variance.sqrt_()


def low_rank_factor(columns: Sequence[Tensor]) -> Tensor:
    """Return D̂ / √(2(R−1)) of R ≥ 2 columns, of shape (R, *weight.shape): SWAG Eq. (1)."""
    return torch.stack(list(columns)).div_(math.sqrt(2 * (len(columns) - 1)))
