"""The parameters of a module that a method trains: all that require a gradient, or those that were chosen."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from torchbayes.core.names import named_modules, named_parameters, named_weights, placed

__all__ = [
    "Params",
    "check_types",
    "frozen_norms",
    "kept_modes",
    "norm_parameters",
    "parameter_groups",
    "selected",
    "trainable",
    "training_only",
]

Params = str | nn.Module | Tensor | Iterable[Any]
"""What `params=` takes: the name of a weight or of a module, a pattern such as `"head.*"` or `"*lora_*"`, a
module, a parameter, or several of these; optimisers also take torch's parameter groups."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_WILD = set("*?[")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` that require a gradient, tied ones once.

    Raises:
        ValueError: If there are none.
    """
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable weights: set requires_grad on some of its parameters"
        )
    return parameters


def selected(
    model: nn.Module, params: Params | None, unless_named: Collection[str] = (), *,
    frozen: bool = True, argument: str = "params",
) -> dict[str, nn.Parameter]:  # fmt: skip
    """Return the parameters that `params` stands for, in its order.

    A pattern or a module stands for the trainable weights that it matches or contains; a weight that is named
    or given itself may be frozen.

    Args:
        model: The network.
        params: The choice; all trainable parameters if None.
        unless_named: Names of weights that patterns, modules and None do not stand for.
        frozen: Whether weights that are named or given themselves may be frozen.
        argument: What the user calls it, for messages.

    Raises:
        ValueError: If a name or pattern matches nothing, or something is no part of the model.

    Example:
        >>> import torch
        >>> net = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
        >>> list(selected(net, "head.*")), list(selected(net, [net["head"], "body.bias"]))
        (['head.weight', 'head.bias'], ['head.weight', 'head.bias', 'body.bias'])
    """
    own = named_parameters(model)
    if params is None:
        return {name: p for name, p in trainable(model).items() if name not in unless_named}
    names = _Names(model, own, unless_named, argument)
    chosen = [
        name
        for choice in ([params] if isinstance(params, (str, nn.Module, Tensor)) else params)
        for name in names.of(choice)
    ]
    if not chosen:
        raise ValueError(
            f"{argument} is empty: name the weights, patterns or modules to train, or leave it out for all"
        )
    still = next((name for name in chosen if not (frozen or own[name].requires_grad)), None)
    if still is not None:
        raise ValueError(
            f"weight {still!r} of {argument} is frozen: set requires_grad on it, or leave it out"
        )
    return {name: own[name] for name in chosen}


def check_types(
    model: nn.Module, chosen: Mapping[str, Tensor], *, half: bool = False,
    sparse_gradients: bool = False,
) -> None:  # fmt: skip
    """Raise an error that names the first weight whose type no method can train.

    Args:
        model: The network, none of whose tensors may be sparse.
        chosen: The weights that are trained, by name; the others may be of any type.
        half: Whether weights in half precision are fine, because nothing adds small steps to them.
        sparse_gradients: Whether gradients may be sparse.
    """
    for name, tensor in named_weights(model).items():
        if not is_lazy(tensor) and tensor.layout != torch.strided:
            raise TypeError(
                f"{name!r} of {type(model).__name__} is a sparse tensor, which can be neither trained nor "
                "saved here: make it dense, or pass it as an input"
            )
    for name, p in chosen.items():
        kind = str(p.dtype).removeprefix("torch.")
        if p.is_complex():
            raise TypeError(
                f"parameter {name!r} is {kind}, and only real weights can be trained here: keep its real and "
                "imaginary parts as two parameters, or freeze it with requires_grad_(False)"
            )
        if p.dtype not in (torch.float32, torch.float64) and not half:
            raise TypeError(
                f"parameter {name!r} is {kind}, in which small steps are rounded away: train float32 weights "
                "and compute in lower precision with torch.autocast (amp= in fit)"
            )
    if sparse_gradients:
        return
    ids = {id(p): name for name, p in chosen.items()}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            name = ids.get(id(module.weight), "")
            if name:
                raise ValueError(
                    f"weight {name!r} belongs to an embedding with sparse=True, whose gradient is not the "
                    "plain one: set sparse=False"
                )


class _Names:
    """Finds the names that a choice stands for."""

    def __init__(
        self, model: nn.Module, own: dict[str, nn.Parameter], unless_named: Collection[str],
        argument: str,
    ) -> None:  # fmt: skip
        self._kind, self._own = type(model).__name__, own
        self._free = {n for n, p in own.items() if p.requires_grad and n not in unless_named}
        self._by_id = {id(p): name for name, p in own.items()}
        self._model, self._argument = model, argument

    def of(self, choice: Any) -> list[str]:
        if isinstance(choice, str):
            return self._named(choice)
        if isinstance(choice, nn.Module):
            inside = [self._by_id[id(p)] for p in choice.parameters() if id(p) in self._by_id]
            return self._trained(inside, f"a {type(choice).__name__}", "has")
        if isinstance(choice, tuple) and len(choice) == 2:  # as model.named_parameters() gives it
            choice = choice[1]
        if not isinstance(choice, Tensor):
            raise TypeError(
                f"{self._argument} has a {type(choice).__name__}: expected names or patterns of weights, "
                "modules, parameters, or a list of these"
            )
        if id(choice) not in self._by_id:
            raise ValueError(
                f"a parameter of shape {tuple(choice.shape)} is not one of {self._kind}'s: pass "
                "parameters of the model that the optimiser was created with"
            )
        return [self._by_id[id(choice)]]

    def _named(self, wanted: str) -> list[str]:
        if wanted in self._own:
            return [wanted]
        if _WILD.isdisjoint(wanted):
            inside = [n for n in self._own if n.startswith(f"{wanted}.") or not wanted]
        else:
            inside = [n for n in self._own if fnmatchcase(n, wanted)]
        if not inside:  # as the wrapped model itself names them
            inside = [
                name
                for name, place in placed(self._model).items()
                if name in self._own
                and (
                    fnmatchcase(place, wanted) or place == wanted or place.startswith(f"{wanted}.")
                )
            ]
        if not inside:
            raise ValueError(
                f"{self._argument} has {wanted!r}, but no weight or module of {self._kind} is called so: "
                f"{self._hint(wanted)}"
            )
        return self._trained(inside, repr(wanted), "matches")

    def _trained(self, inside: list[str], what: str, verb: str) -> list[str]:
        found = [name for name in inside if name in self._free]
        if not found:
            raise ValueError(
                f"{self._argument} has {what}, which {verb} {len(inside)} weights of {self._kind}, but none "
                "to take: set requires_grad on them, or name them one by one"
            )
        return found

    def _hint(self, wanted: str) -> str:
        modules = [short for short, _, _ in named_modules(self._model) if short]
        bare = wanted.strip("*?.")
        near = difflib.get_close_matches(bare, [*modules, *self._own], n=3, cutoff=0.5)
        if near:
            return f"did you mean {' or '.join(map(repr, near))}?"
        tops = list(dict.fromkeys(name.partition(".")[0] for name in self._own))
        return f"its modules are {', '.join(tops[:8])}{' …' if len(tops) > 8 else ''}"


def parameter_groups(model: nn.Module, params: Params | None) -> list[dict[str, Any]]:
    """Return torch's parameter groups of a choice; in a group, `params` may be any choice again.

    Args:
        model: The network.
        params: The choice, as for `selected`, or a list of groups.
    """
    if isinstance(params, dict):
        params = [params]
    if params is not None and not isinstance(params, (str, nn.Module, Tensor)):
        params = list(params)
        if params and all(isinstance(item, dict) for item in params):
            return [
                {**group, "params": list(selected(model, group["params"]).values())}
                for group in params
            ]
    return [{"params": list(selected(model, params).values())}]


@contextmanager
def training_only(model: nn.Module, params: Params | None) -> Iterator[None]:
    """Freeze all weights that `params` does not stand for inside the block; nothing if it is None."""
    chosen = None if params is None else selected(model, params, frozen=False)
    resting = [] if chosen is None else [
        p for name, p in named_parameters(model).items() if p.requires_grad and name not in chosen
    ]  # fmt: skip
    for p in resting:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in resting:
            p.requires_grad_(True)


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore whether each module is in training mode at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def norm_parameters(model: nn.Module) -> set[str]:
    """Return the names of the scales and shifts of norm layers, which methods keep deterministic."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, _, module in named_modules(model)
        if isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers with running statistics that are frozen, and whose statistics should be too.

    One without weights of its own is frozen if the module that contains it is.
    """
    found: list[nn.Module] = []
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, _NormBase) and child.track_running_stats:
                weights = list(child.parameters()) or list(parent.parameters())
                if weights and not any(p.requires_grad for p in weights):
                    found.append(child)
    return found
