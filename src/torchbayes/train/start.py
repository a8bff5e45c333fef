"""Where training starts: given weights, checked and copied into a network, and what starts anew.

fit(model, data, "swag", init="resnet.safetensors")             all weights from a file
fit(model, data, "bbb", init=trained, reset=["head"])           all but those of a new head
fit(model, data, "ensemble", init=trained)                      a new last layer for every member
fit(model, data, "ensemble", init=[net1, net2, net3])           a member from each
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchbayes.core.last_layer import find_last_layer
from torchbayes.core.names import named_modules, named_parameters, named_weights, unwrapped
from torchbayes.core.storage import checksum
from torchbayes.posterior import Point, Posterior, Samples, Weights, load, snapshot

__all__ = ["Init", "Start", "factory", "start_of"]

Init = Mapping[str, Tensor] | Posterior | nn.Module | str | Path
"""Weights to start from: a state dict, a posterior (its mean), a network, or a safetensors file."""

# What training in parallel and torch.compile put in front of every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")


class Start:
    """Given weights of a network, for one member or for several.

    Args:
        given: The weights of every member.
        reset: Names of the weights that are not taken from them.
        source: Where they are from, in words.
    """

    def __init__(self, given: Sequence[Weights], reset: Sequence[str], source: str) -> None:
        self.given, self.reset, self.source = list(given), list(reset), source

    def __len__(self) -> int:
        return len(self.given)

    @torch.no_grad()
    def apply(self, model: nn.Module, member: int = 0) -> None:
        """Copy the weights of a member into a network, except those that start anew."""
        weights = self.given[member % len(self)]
        kept = set(self.reset)
        for name, own in _tensors(model).items():
            found = _find(weights, name, own, model)
            if name in kept or found is None:
                continue
            if own.requires_grad:
                own.copy_(found)
            else:  # its memory may be another network's, which shares what it does not train
                own.data = found.to(own, copy=True)

    @torch.no_grad()
    def redraw(self, model: nn.Module, fresh: nn.Module) -> None:
        """Copy the weights that start anew from another network, `fresh`."""
        own, new = named_parameters(model), named_parameters(fresh)
        for name in self.reset:
            own[name].copy_(new[name])

    def settings(self) -> dict[str, Any]:
        """Return what a run folder records, to check that a run is resumed from the same start."""
        checksums = [f"{checksum({}, weights):08x}" for weights in self.given]
        return {"init_checksum": " ".join(checksums), "reset_weights": self.reset}

    def __str__(self) -> str:
        """Say in one line what training starts from."""
        if not self.reset:
            return f"starts from {self.source}"
        shown = ", ".join(self.reset[:4]) + (" and others" if len(self.reset) > 4 else "")
        return f"starts from {self.source}; new random weights: {shown}"


def start_of(
    init: Init | Sequence[Init] | None, reset: str | Iterable[str] | None, model: nn.Module,
    *, several: bool,
) -> Start | None:  # fmt: skip
    """Read and check what training starts from.

    Args:
        init: The `init` of `fit`.
        reset: The `reset` of `fit`.
        model: The network.
        several: Whether the method trains members that start apart, as an ensemble does. Then a list of
            starting points is allowed, and a single one has a new last layer by default.
    """
    if init is None:
        if reset is not None:
            raise ValueError(
                f"reset is {reset!r}, but without init all weights are the network's own: say in init=… what "
                "the other weights start from, such as init=model"
            )
        return None
    if isinstance(init, Samples) and len(init) > 1:
        init = [dict(weights) for weights in init]
    listed = isinstance(init, (list, tuple))
    if listed and not several and len(init) != 1:  # type: ignore[arg-type]
        raise ValueError(
            f"init has {len(init)} starting points, but this method trains one network: "  # type: ignore[arg-type]
            "pass one of them, or use method='ensemble'"
        )
    every: list[Any] = list(init) if listed else [init]  # type: ignore[arg-type]
    if not every:
        raise ValueError("init is an empty list: give at least one starting point")
    if reset is None:
        reset = _last(model) if several and len(every) == 1 else ()
    names = _matching(model, [reset] if isinstance(reset, str) else list(reset))
    read = [_read(one) for one in every]
    for weights, source in read:
        _check(weights, source, model, names)
        # Buffers are not left from one member to the next.
        for name, own in _tensors(model).items():
            if not isinstance(own, nn.Parameter) and name not in weights:
                weights[name] = own.detach().clone()
    source = read[0][1] if len(read) == 1 else f"{len(read)} given networks"
    return Start([weights for weights, _ in read], names, source)


def factory(
    model: nn.Module | Callable[[], nn.Module], made: nn.Module, start: Start | None
) -> Callable[[], nn.Module]:
    """Return a function that makes another network of the same kind: a random one, or from the start.

    Frozen weights of a network are never changed; those of a function's networks are what it makes them.

    Args:
        model: What the user gave to `fit`.
        made: The network that is trained.
        start: What training starts from, if not from random weights.
    """

    def fresh() -> nn.Module:
        twin = unwrapped(model()) if not isinstance(model, nn.Module) else _redrawn(made, start)
        if start is not None:
            start.apply(twin)
        return twin

    return fresh


def _redrawn(made: nn.Module, start: Start | None) -> nn.Module:
    """Return a copy of a network with new random weights, all that are not frozen or those of `reset`."""
    twin = copy.deepcopy(made)
    chosen = {n for n, p in named_parameters(made).items() if p.requires_grad}
    if start is not None:
        chosen &= set(start.reset)
    for name, _, module in named_modules(twin):
        prefix = f"{name}." if name else ""
        own = [f"{prefix}{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        redraw = getattr(module, "reset_parameters", None)
        if own and chosen.isdisjoint(own):
            continue
        if callable(redraw):
            redraw()
        elif own:
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) has weights but no reset_parameters() to "
                "give them a new random start: pass fit a function that makes the network"
            )
    with torch.no_grad():
        old = named_parameters(made)
        for name, new in named_parameters(twin).items():
            if name not in chosen:
                new.copy_(old[name])
    return twin


def _tensors(model: nn.Module) -> Weights:
    """Return the parameters and the buffers that belong to a model's state, tied ones once."""
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return {name: tensor for name, tensor in named_weights(model).items() if id(tensor) in kept}


def _find(weights: Weights, name: str, own: Tensor, model: nn.Module) -> Tensor | None:
    """Return the given tensor of that name, or of another name that the model has for the weight."""
    if name in weights:
        return weights[name]
    state = model.state_dict(keep_vars=True)
    same = (other for other, tensor in state.items() if tensor is own and other in weights)
    return next((weights[other] for other in same), None)


def _matching(model: nn.Module, reset: Sequence[str]) -> list[str]:
    """Return the names of the trainable weights that `reset` names, alone, by module or by pattern."""
    own = {name: p.requires_grad for name, p in named_parameters(model).items()}
    found: set[str] = set()
    for wanted in reset:
        some = {
            name for name in own
            if name == wanted or name.startswith(f"{wanted}.") or fnmatchcase(name, wanted) or not wanted
        }  # fmt: skip
        if not some:
            raise ValueError(
                f"reset names {wanted!r}, but {type(model).__name__} has no such weight or module: see "
                "model.named_parameters()"
            )
        if not any(own[name] for name in some):
            raise ValueError(
                f"reset names {wanted!r}, whose weights are frozen and so never change: leave it out, or set "
                "requires_grad"
            )
        found |= {name for name in some if own[name]}
    return [name for name in own if name in found]


def _last(model: nn.Module) -> list[str]:
    """Return the name of the last linear layer, or else of the last with weights; none if it is frozen."""
    try:
        name, layer = find_last_layer(model)
    except ValueError:
        weighted = [n for n, m in model.named_modules() if list(m.parameters(recurse=False))]
        name, layer = weighted[-1], model.get_submodule(weighted[-1])  # type: ignore[assignment]
    return [name] if any(p.requires_grad for p in layer.parameters()) else []


def _read(init: Any) -> tuple[Weights, str]:
    """Return given weights, and where they are from in words."""
    if isinstance(init, (str, Path)):
        return _read_file(Path(init))
    if isinstance(init, nn.Module):
        return snapshot(init), f"the weights of the given {type(init).__name__}"
    if isinstance(init, Posterior):
        if isinstance(init, Samples):
            return init[0], "the one snapshot of the given Samples"
        return init.mean(), f"the mean of the given {type(init).__name__}"
    if isinstance(init, Mapping) and all(isinstance(value, Tensor) for value in init.values()):
        return {name: value.detach() for name, value in init.items()}, "the given weights"
    raise TypeError(
        f"init is a {type(init).__name__}: expected a state dict, a posterior, a network, or the path of a "
        "safetensors file"
    )


def _read_file(path: Path) -> tuple[Weights, str]:
    """Read a posterior or a plain state dict in safetensors; never unpickles."""
    if not path.exists():
        hint = "; for MOPED give moped=0.1" if str(path) == "moped" else ""
        raise ValueError(f"init is {str(path)!r}, and there is no such file: check the path{hint}")
    if path.is_file():
        try:
            with safe_open(str(path), framework="pt") as file:
                ours = "torchbayes" in (file.metadata() or {})
                weights = {} if ours else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is cut short, damaged or not a safetensors file ({error}): save the network with "
                "safetensors.torch.save_file(model.state_dict(), path)"
            ) from error
        if not ours:
            return weights, path.name
    posterior = load(path)
    if isinstance(posterior, Samples) and len(posterior) > 1:
        raise ValueError(
            f"{path} holds {len(posterior)} networks, whose average is none of them: pass one, as in "
            "init=tb.load(path)[0], or all of them to method='ensemble', as in init=tb.load(path)"
        )
    if isinstance(posterior, (Point, Samples)):
        return _read(posterior)[0], path.name
    return posterior.mean(), f"the mean of the {type(posterior).__name__} in {path.name}"


def _check(weights: Weights, source: str, model: nn.Module, reset: Sequence[str]) -> None:
    """Raise a `ValueError` that names the first weight that is missing, unknown or of another shape."""
    kind, known = type(model).__name__, model.state_dict(keep_vars=True)
    buffers = dict(model.named_buffers())
    for name in weights:
        if name not in known and name not in buffers:
            prefix = next(
                (p for p in _PREFIXES if name.removeprefix(p) in known and p in name), None
            )
            hint = (
                f"remove {prefix!r} from the front of every name" if prefix
                else "leave it out, or start from weights of the same network"
            )  # fmt: skip
            raise ValueError(
                f"init ({source}) has a weight {name!r} that {kind} does not have: {hint}"
            )
    for name, own in _tensors(model).items():
        if name in reset:
            continue
        found = _find(weights, name, own, model)
        part = name.rpartition(".")[0] or name
        if found is None and isinstance(own, nn.Parameter):
            raise ValueError(
                f"init ({source}) has no weight {name!r}, which {kind} needs: name what is to start from "
                f"random weights, as in reset=[{part!r}]"
            )
        if found is not None and found.shape != own.shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(found.shape)} in init ({source}) but {tuple(own.shape)} "
                f"in {kind}: if this layer is new, let it start from random weights with reset=[{part!r}]"
            )
        if (
            found is not None
            and found.is_floating_point()
            and not bool(torch.isfinite(found).all())
        ):
            raise ValueError(
                f"weight {name!r} of init ({source}) is not finite: give other weights"
            )
