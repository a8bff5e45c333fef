"""What the averagers share: snapshots in, a posterior out, and a state that a resumed run goes on from."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.average.moments import update_mean
from torchbayes.posterior import Posterior, Weights
from torchbayes.predict.batchnorm import recalibrate_batchnorm

__all__ = ["Averager", "look_at"]

P_co = TypeVar("P_co", bound=Posterior, covariant=True)


def look_at(network: nn.Module, names: set[str]) -> tuple[Weights, Weights, Weights]:
    """The weights called `names`, no variances, and the network's other weights and buffers."""
    parameters = dict(network.named_parameters())
    rest = {name: p.detach() for name, p in parameters.items() if name not in names}
    rest |= {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    return {name: p.detach() for name, p in parameters.items() if name in names}, {}, rest


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in a type that a running mean does not stall in."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


class Averager(ABC, Generic[P_co]):
    """Watches weights that something else trains, and averages what it sees.

    Args:
        network: The user's network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._count = 0
        self._mean: Weights = {}
        self._rest: Weights = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._recalibrated = False

    @abstractmethod
    def _look(self) -> tuple[Weights, Weights, Weights]:
        """What there is to see now: the weights to average, variances of some of them, and the rest."""

    @abstractmethod
    def _posterior(self) -> P_co:
        """What the snapshots amount to; there is at least one."""

    def __len__(self) -> int:
        """Count the snapshots so far."""
        return self._count

    @torch.no_grad()
    def update(self) -> None:
        """Take a snapshot into the average."""
        weights, variances, self._rest = self._look()
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        self._recalibrated = False
        self._take(
            *({name: _wide(t) for name, t in group.items()} for group in (weights, variances))
        )
        self._count += 1

    def _take(self, new: Weights, variances: Weights) -> None:
        if self._count == 0:
            self._mean = {name: tensor.clone() for name, tensor in new.items()}
        else:
            update_mean(list(self._mean.values()), [new[name] for name in self._mean], self._count)

    def mean(self) -> Weights:
        """The averaged weights, with the network's other weights and buffers beside them.

        Raises:
            ValueError: If there has been no `update()` yet.
        """
        if self._count == 0:
            raise ValueError(
                f"this {type(self).__name__} has averaged nothing yet: call update() at least once first"
            )
        averaged = {
            name: tensor.to(self._dtypes[name], copy=True) for name, tensor in self._mean.items()
        }
        return averaged | {name: tensor.clone() for name, tensor in self._rest.items()}

    def recalibrate(self, loader: Iterable[Any]) -> None:
        """Re-estimate batch-norm statistics for the mean; they are kept until the next `update()`.

        Args:
            loader: Batches of training data: inputs, or pairs of inputs and targets.
        """
        mean = self.mean()
        if self._has_batchnorm():
            new = recalibrate_batchnorm(self._network, mean, loader)
            self._rest = {name: new[name] for name in self._rest}
            self._recalibrated = True

    def posterior(self, loader: Iterable[Any] | None = None) -> P_co:
        """What the average amounts to, as a posterior of the network.

        Args:
            loader: Batches of training data to `recalibrate` batch-norm statistics with; a network
                without batch norm needs none. All draws share the mean's statistics: see
                `recalibrated_samples` for statistics of every draw's own.

        Raises:
            ValueError: If there has been no `update()` yet.
        """
        if loader is not None:
            self.recalibrate(loader)
        elif self._count and not self._recalibrated and self._has_batchnorm():
            warnings.warn(
                f"{type(self._network).__name__} has batch norm, whose statistics are those of the last "
                "snapshot and do not belong to the average: pass training data in posterior(loader)",
                stacklevel=2,
            )
        return self._posterior()

    def _has_batchnorm(self) -> bool:
        return any(
            isinstance(module, _BatchNorm) and module.track_running_stats
            for module in self._network.modules()
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: tensors, numbers, and dictionaries and lists of them."""
        return {
            "count": self._count,
            "mean": self._mean,
            "rest": self._rest,
            "recalibrated": self._recalibrated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: If it is not the state of such an averager of the same network.
        """
        weights, _, rest = self._look()
        if state["count"]:
            self._check_fit(state["mean"] | state["rest"], weights | rest)
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        self._count, self._recalibrated = state["count"], state["recalibrated"]
        self._mean, self._rest = self._here(state["mean"]), self._here(state["rest"])

    def _here(self, saved: Weights) -> Weights:
        """Copies on the devices that the network's weights are on."""
        own = dict([*self._network.named_parameters(), *self._network.named_buffers()])
        return {name: tensor.to(own[name].device, copy=True) for name, tensor in saved.items()}

    def _check_fit(self, saved: Weights, own: Weights) -> None:
        for name in sorted(saved.keys() | own.keys()):
            there, here = (tuple(g[name].shape) if name in g else "absent" for g in (saved, own))
            if there != here:
                raise ValueError(
                    f"weight {name!r} is {there} in the state but {here} in {type(self._network).__name__}: "
                    "load the state of an averager of the same network"
                )
