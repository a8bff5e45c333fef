"""Which of a network's weights are random, where in the network they are, and how they are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchbayes.core.batch import uncompiled
from torchbayes.core.device import generator_state
from torchbayes.core.names import own_weights, unwrapped
from torchbayes.core.parameters import Params, check_types, norm_parameters, selected, trainable
from torchbayes.posterior import Weights, Wrapper, held_names, snapshot
from torchbayes.posterior.partial import described

__all__ = ["RandomWrapper", "chosen", "tree"]


class RandomWrapper(Wrapper):
    """A wrapper that replaces some of a network's weights by random ones in every call.

    Args:
        model: The network.
        weights: The weights to replace.
        generator: Source of random numbers; torch's global generator if not given.
        trees: Modules with parameters of the weights' names.
    """

    def __init__(
        self, model: nn.Module, weights: Weights, generator: torch.Generator | None, **trees: nn.Module
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.generator, self._names = generator, list(weights)
        for label, module in trees.items():
            self.add_module(label, module)
        self._aliases = _aliases(unwrapped(model), weights)
        self._changing = set(held_names(model, ()))
        # Where to find every parameter: walking through the modules' names takes longer than a small layer.
        own = list(own_weights(model, {name: name for name in weights}))
        self._places = [_places(model, own), *(_places(m, self._names) for m in trees.values())]

    def _current(self) -> list[list[Tensor]]:
        """Return the network's own parameters of the weights' names, and those of each tree."""
        return [[getattr(m, leaf) for m, leaf in places] for places in self._places]

    def _snapshot(self) -> tuple[Weights, dict[str, str]]:
        """Return the network's weights that a posterior has to hold, and what it knows about the network."""
        held = held_names(self.model, also=self._changing)
        return snapshot(self.model, held), described(self.model, held)

    def _call(self, weights: Weights, args: Any, kwargs: Any) -> Any:
        """Run the network with some weights replaced, wherever they are used."""
        given = {alias: w for name, w in weights.items() for alias in self._aliases[name]}
        network = unwrapped(self.model)
        with uncompiled():
            return torch.func.functional_call(network, given, args, kwargs, tie_weights=False)

    def get_extra_state(self) -> Tensor:
        """Return the generator's state, for `state_dict()`."""
        if self.generator is None:
            return torch.empty(0, dtype=torch.uint8)
        return generator_state(self.generator)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a generator's state."""
        if self.generator is not None and len(state):
            self.generator.set_state(state.cpu())


def _places(module: nn.Module, names: list[str]) -> list[tuple[nn.Module, str]]:
    split = [name.rpartition(".") for name in names]
    return [(module.get_submodule(path), leaf) for path, _, leaf in split]


def chosen(model: nn.Module, params: Params | None) -> Weights:
    """Return the parameters that get a distribution.

    Args:
        model: The network.
        params: As for `selected`; norm layers' weights only if they are named or given themselves.
    """
    own = trainable(model)
    for name, parameter in own.items():
        if is_lazy(parameter):
            raise ValueError(
                f"weight {name!r} has no shape yet: run a batch through the network before wrapping it"
            )
    check_types(model, own, half=True)
    others = {name for name, p in own.items() if not p.is_floating_point()}
    found = selected(model, params, norm_parameters(model) | others, frozen=False)
    rest: Weights = {name: p for name, p in own.items() if name in found}
    if not rest:
        raise ValueError(
            f"{type(model).__name__} has no trainable weights to be uncertain about besides norm layers': "
            "name some in params=…"
        )
    return rest


def tree(tensors: Weights) -> nn.Module:
    """Build a module whose parameters have the given dotted names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.register_parameter(leaf, nn.Parameter(tensor))
    return root


def _aliases(model: nn.Module, weights: Weights) -> dict[str, list[str]]:
    """Return all the names under which the weights are used, one for each place that holds them.

    torch can find the names of tied weights itself, but where one module has two names it then does not put
    the weights back (torch 2.13).
    """
    first = {id(weight): name for name, weight in weights.items()}
    result: dict[str, list[str]] = {name: [] for name in weights}
    for prefix, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            if id(weight) in first:
                result[first[id(weight)]].append(f"{prefix}.{leaf}" if prefix else leaf)
    return result
