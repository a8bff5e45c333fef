"""One name for a weight, whatever its network is wrapped in.

torch.compile, DDP, Lightning and PEFT put a network into a module of their own, and its weights then have
longer names, such as `_orig_mod.0.weight`, `module.0.weight`, `net.0.weight` and
`base_model.model.0.base_layer.weight` for `0.weight`. Everything that names a weight (posteriors, priors,
optimisers, files) uses the name without the wrappers, and translates it where torch is to find the weight in
the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn

__all__ = [
    "dormant",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "named_weights",
    "own_weights",
    "placed",
    "unwrapped",
]

_T = TypeVar("_T")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# Children that only a wrapper has, and the names of those that a wrapper shares with other modules.
_ALWAYS = {"_orig_mod", "_checkpoint_wrapped_module"}
_PEFT = {"base_model", "model", "base_layer", "modules_to_save"}
_CANDIDATES = _ALWAYS | {"module", "base_layer", "base_model", "modules_to_save"}


def _from_package(module: nn.Module, *packages: str) -> bool:
    """Whether a class of the packages is among the module's, without importing them."""
    return any(c.__module__.partition(".")[0] in packages for c in type(module).__mro__)


def _lightning_child(module: nn.Module) -> str | None:
    """Return the one child of a LightningModule that has all of its weights."""
    if not any(c.__name__ == "LightningModule" for c in type(module).__mro__):
        return None
    tops = {n.partition(".")[0] for n, _ in [*module.named_parameters(), *module.named_buffers()]}
    return tops.pop() if len(tops) == 1 and tops <= module._modules.keys() else None


def _skipped(module: nn.Module) -> set[str]:
    """Return the children whose names are no part of a weight's name."""
    children = module._modules.keys()
    skipped = _ALWAYS & children
    if isinstance(module, _PARALLEL):
        skipped |= {"module"}
    elif children & _PEFT and _from_package(module, "peft"):
        skipped |= children & _PEFT
    return skipped


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile, DDP and DataParallel, which compute the same as it does."""
    while True:
        if isinstance(model, _PARALLEL):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module once, as (name without wrappers, name in `model`, module), in torch's order."""

    def walk(module: nn.Module, short: str, own: str) -> Iterator[tuple[str, str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield short, own, module
        skipped = _skipped(module)
        if not own and (child := _lightning_child(module)) is not None:
            skipped = {child}
        for name, inner in module._modules.items():
            if inner is None:
                continue
            below = f"{own}{name}."
            if name == "modules_to_save" and name in skipped:
                yield from saved(module, inner, short, below)
            else:
                yield from walk(inner, short if name in skipped else f"{short}{name}.", below)

    def saved(
        wrapper: nn.Module, copies: nn.Module, short: str, own: str
    ) -> Iterator[tuple[str, str, nn.Module]]:
        # PEFT's trained copies of a module, one for each adapter: the active one is the module.
        active = getattr(wrapper, "active_adapter", None)
        for name, inner in copies._modules.items():
            if inner is not None:
                alone = name == active or active == [name]
                path = short if alone else f"{short}modules_to_save.{name}."
                yield from walk(inner, path, f"{own}{name}.")

    seen: set[int] = set()
    for short, own, module in walk(model, "", ""):
        yield short.removesuffix("."), own.removesuffix("."), module


def dormant(model: nn.Module) -> set[int]:
    """Return the ids of weights that PEFT keeps beside trained copies of them and does not use."""
    originals = [
        module._modules.get("original_module")
        for module in model.modules()
        if "modules_to_save" in module._modules and _from_package(module, "peft")
    ]
    return {id(t) for m in originals if m is not None for t in [*m.parameters(), *m.buffers()]}


def _members(
    model: nn.Module, of: str
) -> tuple[dict[str, Tensor], dict[str, str]]:  # `of`: _parameters or _buffers
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    seen: set[int] = set()
    for short, own, module in named_modules(model):
        for leaf, tensor in getattr(module, of).items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            place = f"{own}.{leaf}" if own else leaf
            name = f"{short}.{leaf}" if short else leaf
            if name in tensors:  # two weights that differ in the wrapper only
                name = place
            tensors[name], places[name] = tensor, place
    return tensors, places


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` by their names without wrappers, a tied one once."""
    return _members(model, "_parameters")[0]  # type: ignore[return-value]


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of `model` by their names without wrappers, a shared one once."""
    return _members(model, "_buffers")[0]


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `model` by their names without wrappers, tied ones once."""
    return _members(model, "_parameters")[0] | named_buffers(model)


def placed(model: nn.Module) -> dict[str, str]:
    """Return the name in `model` of every parameter and buffer by its name without wrappers."""
    return _members(model, "_parameters")[1] | _members(model, "_buffers")[1]


def own_weights(model: nn.Module, weights: Mapping[str, _T]) -> dict[str, _T]:
    """Return weights under the names that `model`, wrappers included, has for them."""
    if not _lightning_child(model) and not any(
        module._modules.keys() & _CANDIDATES for module in model.modules()
    ):
        return weights if isinstance(weights, dict) else dict(weights)
    places = placed(model)
    return {places.get(name, name): value for name, value in weights.items()}
