"""Work that no draw changes, done once: the part of a network before the first weight that varies.

While the network runs under the first draw, every call whose tensors come from the inputs and from weights
that do not vary is recorded: of modules in which nothing varies as a whole, of torch's functions around them
one by one. Under the other draws, the network's own code runs again, and a call that was recorded, with the
same arguments, returns the tensors that it returned before. So there is nothing to trace and no code that
cannot be traced, and a draw that takes another way through the code finds nothing recorded there and runs it.

A recorded tensor must not change afterwards. Calls that write to one, as ReLU in place does, are recorded
like others, in their order; if anything else has read it before, or a draw's own work writes to it, nothing
is shared. Random numbers are never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, EllipsisType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from torchbayes.core.device import device_random_state
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.posterior import Weights
from torchbayes.predict.sizes import size_of
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["NotShareableError", "Record", "Sharing", "find_sharing"]

# What these functions return does not depend on a tensor's numbers.
_ABOUT = {"__get__", "__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
          "ndimension", "nelement", "numel", "size", "stride"}  # fmt: skip


_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FIXED = (
    NoneType, EllipsisType, bool, int, float, complex, str, bytes, type, FunctionType,
    BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class NotShareableError(RuntimeError):
    """The network does something with tensors because of which its work cannot be shared."""


class _Call(NamedTuple):
    leaves: list[Any]
    spec: TreeSpec
    written: list[int]  # memory that the call has written to


class Record(TorchFunctionMode):
    """Records the calls of a pass that no draw changes inside the block, then repeats their results.

    Args:
        inputs: The inputs of the pass.
        constant: Weights that do not vary.
        opaque: The ids of modules that return something else than tensors, to which new ones are added.

    Attributes:
        useful: Whether a call that was recorded reads weights.
        tail: Bytes of the largest result of a call that depends on the draw.
        kept: Bytes of the results that are kept.
    """

    def __init__(self, inputs: Any, constant: Iterable[Tensor], opaque: set[int]) -> None:
        super().__init__()
        self._opaque = opaque
        self.useful, self.tail, self.kept = False, 0, 0
        self._calls: dict[Hashable, _Call] = {}
        self._known: dict[int, tuple[Tensor, int]] = {}  # tensors by their id, and their memory
        self._versions: list[tuple[Tensor, int]] = []
        self._written: dict[int, int] = {}  # how often memory has been written to in this pass
        self._read: set[tuple[int, int]] = set()  # memory that a draw's own work has read, and when
        self._recording, self._inside, self._random = True, False, False
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        for tensor in constant:
            self._add(tensor)
        self._places = {t.device for t, _ in self._known.values() if not t.is_meta}
        self._places.add(torch.device("cpu"))

    def _random_states(self) -> list[Tensor]:
        return [device_random_state(place) for place in self._places]

    def _add(self, tensor: Tensor) -> None:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, tensor.untyped_storage()._cdata

    def __enter__(self) -> Record:
        self._written = {}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is not None:
            return
        if self._recording:
            self._recording = False
            if any(self._written.get(memory, 0) != times for memory, times in self._read):
                raise NotShareableError("a tensor was read before it was written to")
            self._versions = [(tensor, tensor._version) for tensor, _ in self._known.values()]
        elif any(tensor._version != version for tensor, version in self._versions):
            raise NotShareableError(
                "a draw's own work has written to a tensor that all draws share"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a torch function, or return what it returned before."""
        kwargs = kwargs or {}
        if self._inside:
            self._random = self._random or kwargs.get("generator") is not None
            return func(*args, **kwargs)
        return self.call(func, func, args, kwargs)

    def call(
        self, name: Hashable, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:  # fmt: skip
        """Call a function or a module's forward, or return what it returned before.

        Args:
            name: What to know it by.
            func: The function.
            args: Its arguments.
            kwargs: Its named arguments.
            module: The module, if it is one in which nothing varies.
        """
        key = self._key(name, (args, kwargs))
        if getattr(func, "__name__", "") in _EMPTY:
            key = None  # somebody will fill it, perhaps with random numbers
        known = None if key is None else self._calls.get(key)
        if known is not None:
            self._advance(known.written)
            return tree_unflatten(known.leaves, known.spec)
        if not self._recording:
            return func(*args, **kwargs)
        if key is None and module is not None:
            return func(*args, **kwargs)  # what happens inside is looked at
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        common = [t for t in given if id(t) in self._known]
        with torch._C.DisableTorchFunction():  # for what follows is no part of the network
            versions = [t._version for t in common]
            before = self._random_states() if key is not None else None
        self._random, self._inside = kwargs.get("generator") is not None, module is not None
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside = False
        with torch._C.DisableTorchFunction():
            written = [t for t, v in zip(common, versions, strict=True) if t._version != v]
            leaves, spec = tree_flatten(result)
            after = self._random_states()
            if before is None or not all(map(torch.equal, before, after)):
                self._random = True
            if not self._random and _is_plain(leaves):
                self._keep(key, leaves, spec, written)
                self.useful = self.useful or _reads_weights(module, given)
                return result
            if written:
                raise NotShareableError("a draw's own work writes to a tensor that all draws share")
            if module is not None:
                self._opaque.add(id(module))
            if getattr(func, "__name__", "") not in _ABOUT:
                for tensor in common:
                    memory = self._known[id(tensor)][1]
                    self._read.add((memory, self._written.get(memory, 0)))
                self.tail = max(self.tail, size_of(leaves))
            return result

    def _keep(
        self, key: Hashable, leaves: list[Any], spec: TreeSpec, written: list[Tensor]
    ) -> None:
        memories = list({self._known[id(tensor)][1] for tensor in written})
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.kept += leaf.numel() * leaf.element_size() * (id(leaf) not in self._known)
                self._add(leaf)
        self._calls[key] = _Call(leaves, spec, memories)
        self._advance(memories)

    def _advance(self, written: list[int]) -> None:
        for memory in written:
            self._written[memory] = self._written.get(memory, 0) + 1

    def _key(self, name: Hashable, arguments: Any) -> Hashable | None:
        """Return what identifies a call and its arguments; None if it depends on the draw."""
        try:
            return name, self._part(arguments)
        except _OwnError:
            return None

    def _part(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            entry = self._known.get(id(value))
            if entry is None:
                raise _OwnError
            return Tensor, id(value), self._written.get(entry[1], 0)
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._part, value)
        if isinstance(value, dict):
            return dict, *((name, self._part(inner)) for name, inner in value.items())
        if isinstance(value, slice):
            return slice, *map(self._part, (value.start, value.stop, value.step))
        if not isinstance(value, _FIXED):
            raise _OwnError  # what it stands for might change
        return type(value), value  # 1, 1.0 and True are equal


class _OwnError(Exception):
    """A value depends on the draw."""


def _is_plain(leaves: list[Any]) -> bool:
    """Whether there are tensors among the leaves of a result, and nothing unknown."""
    rest = [leaf for leaf in leaves if type(leaf) not in (Tensor, nn.Parameter)]
    return len(rest) < len(leaves) and all(isinstance(leaf, _FIXED) for leaf in rest)


def _reads_weights(module: nn.Module | None, given: list[Tensor]) -> bool:
    if module is not None:
        return next(module.parameters(), None) is not None
    return any(isinstance(tensor, nn.Parameter) for tensor in given)


class Sharing:
    """Lets the draws of a network share the work that none of them changes.

    Args:
        network: The network.
        constant: Names of the parameters and buffers that do not vary.
    """

    def __init__(self, network: SwappedNetwork, constant: Iterable[str]) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in network.twin.modules()):
            raise NotShareableError("a scripted module does not show what it calls")
        self._constant = [network.own(name) for name in constant]
        self._active: Record | None = None
        self.opaque: set[int] = set()
        same = {id(tensor) for tensor in self._constant}
        for module in network.twin.modules():
            if module is not network.twin and not isinstance(
                module, (nn.ModuleList, nn.ModuleDict)
            ):
                inside = [*module.parameters(), *module.buffers()]
                if all(id(tensor) in same for tensor in inside):
                    module.forward = partial(self._forward, module, module.forward)

    def _forward(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        record = self._active
        if record is None or record._inside or id(module) in self.opaque:
            return forward(*args, **kwargs)
        return record.call(id(module), forward, args, kwargs, module)

    def record(self, inputs: Any) -> Record:
        """Return a new record for some inputs."""
        return Record(inputs, self._constant, self.opaque)

    @contextmanager
    def using(self, record: Record) -> Iterator[None]:
        """Run the network inside the block with a record: the first time to fill it, then to use it."""
        self._active = record
        try:
            with record:
                yield
        finally:
            self._active = None


def find_sharing(
    network: SwappedNetwork, draws: Sequence[Weights], constant: Iterable[str], inputs: Any,
    output: Output,
) -> tuple[Sharing, int, int] | None:  # fmt: skip
    """Try whether draws can share work, and whether the second draw's outputs are then those without sharing.

    Args:
        network: The network.
        draws: Two draws or more.
        constant: Names of the parameters and buffers that do not vary.
        inputs: A few inputs.
        output: Where the likelihood's tensor is in what the network returns.

    Returns:
        What lets draws share work, the bytes of the largest result that depends on the draw, and those of
        all results that are kept for the other draws; None if draws have to do all of it themselves, or if
        there is nothing that is worth it.
    """
    try:
        sharing = Sharing(network, constant)
        looked: set[int] | None = None
        while looked != sharing.opaque:  # inside of modules that turn out to be opaque
            looked, record = set(sharing.opaque), sharing.record(inputs)
            with sharing.using(record):
                network(draws[0], inputs)
        if not record.useful:
            return None
        with sharing.using(record):
            found = output_tensor(network(draws[1], inputs), output)
        expected = output_tensor(network(draws[1], inputs), output)
    except Exception:
        return None
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True):
        return None
    return sharing, record.tail, record.kept
