"""The base of the averagers: snapshots in, a posterior out, and a state to resume from."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbayes.average.moments import update_mean
from torchbayes.core.names import named_modules, named_weights
from torchbayes.core.parameters import Params, check_types, selected
from torchbayes.core.shards import check_alike, is_sharded, local, part, whole, wrapped
from torchbayes.posterior import Posterior, Weights, held_names
from torchbayes.posterior.partial import described
from torchbayes.predict.batchnorm import recalibrate_batchnorm

__all__ = ["Averager"]

P_co = TypeVar("P_co", bound=Posterior, covariant=True)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to a type in which a running mean does not stall."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


class Averager(ABC, Generic[P_co]):
    """Average weights that something else trains.

    Args:
        model: The user's network.
        params: What to average: names or patterns of weights, modules or parameters; all that require a
            gradient when the averager is made if None.
    """

    def __init__(self, model: nn.Module, params: Params | None = None) -> None:
        self._network = model
        chosen = selected(model, params)
        check_types(model, chosen, half=True, sparse_gradients=True)
        self._names = set(chosen)
        self._changing = set(held_names(model, ()))
        self._count = 0
        self._mean: Weights = {}
        self._rest: Weights = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._recalibrated = False
        check_alike(chosen)
        self._sharded = any(is_sharded(p) for p in chosen.values())

    def _current(self) -> tuple[Weights, Weights, Weights]:
        """Return the weights to average, the variances of some of them, and other weights and buffers."""
        own = named_weights(self._network)
        held = held_names(self._network, self._names, self._changing)
        rest = {n: whole(own[n].detach()).clone() for n in held if n not in self._names}
        return {n: local(own[n].detach()) for n in held if n in self._names}, {}, rest

    def _whole(self, own: Weights) -> Weights:
        """Return whole tensors, where the network's weights are shared out over processes."""
        if not self._sharded:
            return own
        like = named_weights(self._network)
        return {n: whole(wrapped(t, like[n])) if n in self._names else t for n, t in own.items()}

    def _about(self) -> dict[str, str]:
        """Return what the posterior knows about the network."""
        return described(self._network, [*self._mean, *self._rest])

    def _has_batchnorm(self) -> bool:
        """Whether there are batch-norm statistics that go with the averaged weights."""
        return any(
            isinstance(module, _BatchNorm) and f"{short}.running_mean".lstrip(".") in self._rest
            for short, _, module in named_modules(self._network)
        )

    @abstractmethod
    def _posterior(self) -> P_co:
        """Return the posterior of the snapshots, of which there is at least one."""

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return self._count

    @torch.no_grad()
    def update(self) -> None:
        """Add a snapshot to the average."""
        *now, self._rest = self._current()
        self._dtypes = {name: weight.dtype for name, weight in now[0].items()}
        self._recalibrated = False
        self._add(*({name: _wide(tensor) for name, tensor in group.items()} for group in now))
        self._count += 1

    def _add(self, new: Weights, variances: Weights) -> None:
        if self._count == 0:
            self._mean = {name: tensor.clone() for name, tensor in new.items()}
        else:
            update_mean(list(self._mean.values()), [new[name] for name in self._mean], self._count)

    def mean(self) -> Weights:
        """Return the averaged weights, with the buffers that changed in training.

        Raises:
            ValueError: If there has been no `update()` yet.
        """
        if self._count == 0:
            raise ValueError(
                f"this {type(self).__name__} has averaged nothing yet: call update() at least once first"
            )
        averaged = {
            name: tensor.to(self._dtypes[name], copy=True)
            for name, tensor in self._whole(self._mean).items()
        }
        return averaged | {name: tensor.clone() for name, tensor in self._rest.items()}

    def recalibrate(self, loader: Iterable[Any]) -> None:
        """Re-estimate the batch-norm statistics of the mean, which are kept until the next `update()`.

        Args:
            loader: Batches of training data: inputs, or pairs of inputs and targets.
        """
        mean = self.mean()
        if self._has_batchnorm():
            new = recalibrate_batchnorm(self._network, mean, loader)
            self._rest = {name: new[name] for name in self._rest}
            self._recalibrated = True

    def posterior(self, loader: Iterable[Any] | None = None) -> P_co:
        """Return the posterior of the network.

        Args:
            loader: Batches of training data to `recalibrate` batch-norm statistics with; not needed
                without batch norm. All draws share the mean's statistics: see `recalibrate_batchnorm` for
                statistics per draw.

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

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs: tensors, numbers, and dictionaries and lists of them.

        Of a sharded network every process gets whole tensors, which any number of processes can load.
        """
        return {
            "count": self._count,
            "mean": self._whole(self._mean),
            "rest": self._rest,
            "recalibrated": self._recalibrated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: If it is not the state of such an averager of the same network.
        """
        weights, _, rest = self._current()
        own = named_weights(self._network)
        if state["count"]:
            self._check_fit(state["mean"] | state["rest"], {n: own[n] for n in [*weights, *rest]})
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        self._count, self._recalibrated = state["count"], state["recalibrated"]
        self._mean, self._rest = self._here(state["mean"]), self._here(state["rest"])

    def _here(self, saved: Weights) -> Weights:
        """Copy tensors to the devices of the network's weights."""
        own = named_weights(self._network)
        return {
            name: part(tensor, own[name]).to(own[name].device, copy=True)
            if name in self._names
            else tensor.to(own[name].device, copy=True)
            for name, tensor in saved.items()
        }

    def _check_fit(self, saved: Weights, own: Weights) -> None:
        for name in sorted(saved.keys() | own.keys()):
            there, here = (tuple(g[name].shape) if name in g else "absent" for g in (saved, own))
            if there != here:
                raise ValueError(
                    f"weight {name!r} is {there} in the state but {here} in {type(self._network).__name__}: "
                    "load the state of an averager of the same network"
                )
