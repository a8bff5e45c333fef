"""The base of SWAG and HWA, which keep second moments too and give a Gaussian."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import torch
from torch import nn

from torchbayes.average.averager import Averager
from torchbayes.average.moments import diagonal_std, low_rank_factor, update_mean, update_spread
from torchbayes.core.parameters import Params
from torchbayes.posterior import Gaussian, LowRankGaussian, Weights

__all__ = ["GaussianAverager"]

AnyGaussian: TypeAlias = Gaussian | LowRankGaussian


class GaussianAverager(Averager[AnyGaussian]):
    """Keep the mean, the spread around it, the snapshots' own variances and the last few deviations.

    Args:
        network: The user's network.
        rank: Number of the last deviations from the mean to keep: 0, or at least 2.
        params: What to average, as for `Averager`.
    """

    def __init__(self, network: nn.Module, rank: int, params: Params | None = None) -> None:
        if rank < 0 or rank == 1:
            raise ValueError(f"rank is {rank}: expected 0 for a diagonal covariance, or at least 2")
        super().__init__(network, params)
        self.rank = rank
        self._spread: Weights = {}
        self._within: Weights = {}
        self._columns: deque[Weights] = deque(maxlen=rank)

    def _add(self, new: Weights, variances: Weights) -> None:
        if self._count == 0:
            self._spread = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
            self._within = {name: tensor.clone() for name, tensor in variances.items()}
        else:
            mean, values = list(self._mean.values()), [new[name] for name in self._mean]
            update_spread([self._spread[name] for name in self._mean], mean, values, self._count)
            if self._within:
                sigma2 = [variances[name] for name in self._within]
                update_mean(list(self._within.values()), sigma2, self._count)
        super()._add(new, variances)
        if self.rank:
            # Each from the running mean at its time, as in SWAG's Algorithm 1.
            self._columns.append({name: new[name] - mean for name, mean in self._mean.items()})

    def _posterior(self) -> AnyGaussian:
        mean, about = self.mean(), self._about()
        low_rank = len(self._columns) > 1
        std = {
            n: diagonal_std(self._within.get(n), spread, low_rank=low_rank).to(mean[n].dtype)
            for n, spread in self._spread.items()
        }
        std = self._whole(std)
        if not low_rank:
            return Gaussian(mean, std, **about)
        columns = [self._whole(column) for column in self._columns]
        factors = {
            name: low_rank_factor([column[name] for column in columns]).to(mean[name].dtype)
            for name in self._spread
        }
        return LowRankGaussian(mean, std, factors, **about)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the deviations."""
        return super().state_dict() | {
            "rank": self.rank,
            "spread": self._whole(self._spread),
            "within": self._whole(self._within),
            "columns": [self._whole(column) for column in self._columns],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: If it is not the state of such an averager of the same network and rank.
        """
        if state.get("rank") != self.rank:
            raise ValueError(
                f"the state has rank {state.get('rank')} but this {type(self).__name__} has rank "
                f"{self.rank}: make it with the same rank"
            )
        super().load_state_dict(state)
        self._spread, self._within = self._here(state["spread"]), self._here(state["within"])
        self._columns = deque((self._here(column) for column in state["columns"]), maxlen=self.rank)
