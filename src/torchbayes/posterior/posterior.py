"""The interface of every posterior, and copying weights out of a network."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchbayes.core.names import (
    named_modules,
    named_parameters,
    named_weights,
    own_weights,
    unwrapped,
)
from torchbayes.core.shards import refuse_sharded, whole
from torchbayes.core.storage import write_tensors
from torchbayes.posterior.partial import digest_of_rest

__all__ = [
    "Posterior",
    "StoredPosterior",
    "Weights",
    "Wrapper",
    "assign",
    "copied",
    "lent",
    "plain_network",
    "snapshot",
]

Weights = dict[str, Tensor]


def snapshot(model: nn.Module, held: Iterable[str] | None = None) -> Weights:
    """Copy the parameters and buffers of `model`; a tied weight appears once, under its first name.

    Names are those without `torch.compile`, DDP and other wrappers. Of a model that `fully_shard` has shared
    out every process gets the whole weights, on the CPU; all of them must call it.

    Args:
        model: The network.
        held: Names of those to copy; all if None.
    """
    named = named_weights(model)
    # Of a sharded model a layer at a time is gathered, to the CPU.
    return {name: whole(named[name].detach()).clone() for name in (named if held is None else held)}


@torch.no_grad()
def assign(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write weights into a network, in place; what they do not name stays as it is."""
    own = named_weights(model)
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(
                f"weight {name!r} of the draw does not fit {type(model).__name__}: use the model that the "
                "posterior was trained with"
            )
        own[name].copy_(tensor)


def copied(weights: Mapping[str, Tensor]) -> Weights:
    """Return weights that later training steps of their model do not change, in torch's order of memory."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }


def lent(weights: Mapping[str, Tensor]) -> Weights:
    """Return new tensors on the same memory, so that a reader may replace their `data` harmlessly."""
    return {name: tensor.detach() for name, tensor in weights.items()}


class Wrapper(nn.Module):
    """A module around the user's network that draws, perturbs or generates its weights.

    Args:
        model: The user's network.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_sharded(
            model.parameters(),
            f"{type(model).__name__} is sharded (fully_shard), but {type(self).__name__} needs whole weights:"
            " use IVON, a sampler or SWAG, or keep the whole model in every process",
        )
        super().__init__()
        self.model = model

    def __repr__(self) -> str:
        # One line, and not torch's list of all layers: the network itself prints that.
        network = type(unwrapped(self.model)).__name__
        return f"{type(self).__name__}({', '.join(filter(None, [network, self.extra_repr()]))})"


def plain_network(model: nn.Module) -> nn.Module:
    """Return the user's network inside a `Wrapper`, torch.compile and DDP, or the network itself."""
    model = unwrapped(model)
    return unwrapped(model.model) if isinstance(model, Wrapper) else model


def _place_of(names: Iterable[str], model: nn.Module) -> str:
    """Say which module to use in place of `model` for weights that it does not have under these names."""
    names = set(names)
    for _, place, module in named_modules(model):
        if place and names <= named_weights(module).keys():
            return f"it fits its module {place!r}, so pass model.{place}"
    tops = {name.partition(".")[0] for name in names}
    if len(tops) == 1 and {n.partition(".")[2] for n in names} <= named_weights(model).keys():
        top = tops.pop()
        return (
            f"it was made for a module that has this one as {top!r}, so pass that module, or make it "
            f"for module.{top}"
        )
    return "use the model that it was trained with"


class Posterior(ABC):
    """A distribution over a network's weights.

    A subclass sets `kind`, its name in files, and defines `mean`, `sample` and the three file methods.
    Nothing else in the library needs to know about it.

    It may hold some of a network's weights only, those that were trained. The others are the network's own,
    and `rest` says which they have to be.

    Attributes:
        model_name: The class name of the model, for error messages and files.
        rest: `digest_of_rest` of the network without the weights that are held; empty if all are.
        vmappable: Whether `torch.func.vmap` may run several draws at once through `call`.
        shares_statistics: Whether different draws have one set of batch-norm statistics.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Posterior]]] = {}
    vmappable: bool = True
    shares_statistics: bool = True
    # Whether writing to the draws of `_lent` would change the posterior.
    _lends_own: ClassVar[bool] = False
    model_name: str = ""
    rest: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (
            "kind" in cls.__dict__
        ):  # a subclass that only inherits its kind does not replace its base
            Posterior.kinds[cls.kind] = cls

    @abstractmethod
    def mean(self) -> Weights:
        """Return the mean weights, as new tensors."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Return one draw of the weights, as new tensors."""

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """Yield at most `count` draws to average over.

        A posterior with finitely many members yields each of them once rather than some of them twice.
        """
        for _ in range(count):
            yield self.sample(generator)

    def _lent(
        self, count: int, generator: torch.Generator | None, *, reuse: bool
    ) -> Iterator[Weights]:
        """Like `draws`, but may yield views of the posterior, and with `reuse` overwrite the last draw."""
        return self.draws(count, generator)

    def _trimmed(self) -> tuple[Posterior, Weights]:
        """Return the posterior of the weights that vary, which has the same draws, and the other weights."""
        return self, {}

    def call(self, model: nn.Module, draw: Weights, *args: Any, **kwargs: Any) -> Any:
        """Run `model` under one draw without changing the model's own weights."""
        model = unwrapped(model)
        return torch.func.functional_call(model, own_weights(model, draw), args, kwargs)

    def check(self, model: nn.Module) -> None:
        """Raise a `ValueError` that names the first weight that does not fit `model`.

        Weights that the posterior does not hold have to be the ones that it was trained with.
        """
        model = unwrapped(model)
        refuse_sharded(
            model.parameters(),
            f"{type(model).__name__} is sharded (fully_shard), and a prediction needs whole weights: pass a "
            "model of the same class that is not",
        )
        own = {name: tuple(tensor.shape) for name, tensor in named_weights(model).items()}
        shapes = self._shapes()
        for name, shape in shapes.items():
            if name not in own and name in model.state_dict(keep_vars=True):
                raise ValueError(
                    f"weight {name!r} of {type(model).__name__} is tied to another one: name a tied weight "
                    "once, as torchbayes.snapshot(model) does"
                )
            if name not in own:
                raise ValueError(
                    f"the posterior of a {self.model_name or 'model'} has a weight {name!r} that "
                    f"{type(model).__name__} does not have: {_place_of(shapes, model)}"
                )
            if own[name] != shape:
                raise ValueError(
                    f"weight {name!r} has shape {shape} in the posterior but {own[name]} in "
                    f"{type(model).__name__}: use the model that it was trained with"
                )
        if self.rest:
            if digest_of_rest(model, shapes) != self.rest:
                raise ValueError(
                    f"the posterior holds {len(shapes)} of the {len(own)} weights of a "
                    f"{self.model_name or 'model'}, and the rest of the network is not the one that the "
                    "posterior was trained with: load its weights first, as they were in training"
                )
            return
        missing = [
            n for n, p in named_parameters(model).items() if n not in shapes and p.requires_grad
        ]
        if missing:
            raise ValueError(
                f"the posterior of a {self.model_name or 'model'} has no weight {missing[0]!r}, which "
                f"{type(model).__name__} needs: use the model that it was trained with, or pass on the "
                "`rest` of the posterior that it was made from"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.mean().items()}

    # What a file holds: named groups of tensors and JSON settings.

    @abstractmethod
    def _file_tensors(self) -> Mapping[str, Weights]:
        """Return the tensors to save, by group."""

    def _file_settings(self) -> dict[str, Any]:
        """Return the settings to save, as JSON can hold them."""
        return {}

    @classmethod
    @abstractmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Posterior:
        """Return the posterior that `_file_tensors` and `_file_settings` described."""

    def save(self, path: str | Path) -> None:
        """Write the posterior to `path`, whole or not at all.

        Args:
            path: The file to write, by convention `posterior.safetensors`.
        """
        tensors = {
            f"{group}/{name}": tensor
            for group, weights in self._file_tensors().items()
            for name, tensor in weights.items()
        }
        write_tensors(
            Path(path), tensors, kind=self.kind, model_name=self.model_name,
            settings=self._file_settings() | ({"rest": self.rest} if self.rest else {}),
        )  # fmt: skip

    def __repr__(self) -> str:
        count = sum(torch.Size(shape).numel() for shape in self._shapes().values())
        return f"{type(self).__name__}({count:,} weights of {self.model_name or 'a model'})"


class StoredPosterior(Posterior):
    """A posterior that holds its mean weights.

    Args:
        mean: The mean weights, and buffers if the draws share some.
        model_name: The class name of their model.
        rest: `digest_of_rest` of the model without these weights; empty if they are all.
    """

    def __init__(self, mean: Weights, model_name: str, rest: str = "") -> None:
        self._mean, self.model_name, self.rest = copied(mean), model_name, rest

    def mean(self) -> Weights:
        """Return the mean weights."""
        return copied(self._mean)

    def _random(self) -> Iterable[str]:
        """Name the weights that vary from draw to draw."""
        return self._mean

    def _trimmed(self) -> tuple[Posterior, Weights]:
        drawing = {"_random", "mean", "sample", "draws", "_lent", "call"}
        owner = next(kind for kind in type(self).__mro__ if vars(kind).keys() & drawing)
        random = set(self._random())
        if "_random" not in vars(owner) or random >= self._mean.keys():
            return self, {}  # in the first case, a subclass draws in its own way
        varying = copy.copy(self)
        varying._mean = {name: tensor for name, tensor in self._mean.items() if name in random}
        return varying, lent({n: t for n, t in self._mean.items() if n not in random})

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._mean.items()}

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean}
