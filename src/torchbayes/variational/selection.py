"""Which of a network's weights get a distribution, and where in the network they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.posterior import Weights

__all__ = ["aliases", "chosen", "places", "tree"]


def chosen(model: nn.Module, params: Iterable[str] | None) -> Weights:
    """The parameters that get a distribution.

    Args:
        model: The network.
        params: The names of weights, or of modules whose weights are meant (norm layers' excepted); all
            trainable ones but norm layers' if not given.
    """
    own = trainable(model)
    for name, parameter in own.items():
        if is_lazy(parameter):
            raise ValueError(
                f"weight {name!r} has no shape yet: run a batch through the network before wrapping it"
            )
    norms = norm_parameters(model)
    rest: Weights = {
        name: p for name, p in own.items() if name not in norms and p.is_floating_point()
    }
    if params is not None:
        if isinstance(params, str):
            params = [params]
        names: set[str] = set()
        for wanted in params:
            below = {name for name in rest if name.startswith(f"{wanted}.") or not wanted}
            found = {wanted} if wanted in own else below
            if not found:
                raise ValueError(
                    f"{type(model).__name__} has no trainable weight or module {wanted!r}: "
                    "see model.named_parameters()"
                )
            names |= found
        rest = {name: p for name, p in own.items() if name in names}
    if not rest:
        raise ValueError(
            f"{type(model).__name__} has no trainable weights to be uncertain about besides norm layers': "
            "name some in params=…"
        )
    return rest


def tree(tensors: Weights) -> nn.Module:
    """A module whose parameters have the given dotted names."""
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


def aliases(model: nn.Module, weights: Weights) -> dict[str, list[str]]:
    """All the names under which the weights are used, one for each place that holds them.

    torch can find the names of tied weights by itself, but where one module has two names it then
    does not put the weights back (torch 2.13).
    """
    first = {id(weight): name for name, weight in weights.items()}
    result: dict[str, list[str]] = {name: [] for name in weights}
    for prefix, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            if id(weight) in first:
                result[first[id(weight)]].append(f"{prefix}.{leaf}" if prefix else leaf)
    return result


def places(module: nn.Module, names: list[str]) -> list[tuple[nn.Module, str]]:
    """The modules that hold the named parameters, with the parameters' own names in them."""
    split = [name.rpartition(".") for name in names]
    return [(module.get_submodule(path), leaf) for path, _, leaf in split]
