"""Two accelerators that are not there: tensors on "sim:0" and "sim:1", which are computed on the CPU.

    with simulated_accelerators():
        x = torch.randn(3, device="sim:1")
        x + torch.ones(3)    # RuntimeError: expected all tensors to be on the same device

They are devices as torch knows them (its place for back ends from outside, PrivateUse1, whose kernels may be
written in Python): tensors are plain `torch.Tensor`s with storages of their own, so that everything above
the kernels (autograd, vmap, optimisers, `_foreach_`, hooks, copies, files) is torch's own code. One kernel
serves every operation: it runs it on the memory of its tensors as the CPU would.

What an accelerator refuses is refused here: tensors of several devices in one operation, except for numbers
(tensors without dimensions, in operations entry by entry), indices and copies; a generator of another device,
its state included; `.numpy()`. Each device has its own random numbers.

Not simulated: time, streams, pinned memory, precision, and which kernels a back end lacks.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["COUNT", "KIND", "simulated_accelerators"]

KIND, COUNT = "sim", 2

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_STRIDED = torch.ops.aten.as_strided.default
_SET = torch.ops.aten.set_.source_Storage_storage_offset
# Operations that take indices or masks of the CPU as well.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


# Tensors that claim to be on a device.


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Array(ctypes.Structure):
    """A DLPack tensor: how libraries tell each other of memory, the device that it is on included."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _Device), ("dimensions", ctypes.c_int32), ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_OUTSIDE = 12  # DLPack's number for PrivateUse1
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}
_BYTE = _Type(_CODES["uint"], 8, 1)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# One for all, and for ever: torch looks at it again when it gives the memory back.
_array, _size, _stride = _Array(), (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)(1)
_lock = threading.Lock()


def _type(dtype: torch.dtype) -> _Type:
    name = str(dtype).removeprefix("torch.").rstrip("0123456789")
    return _Type(_CODES[name], 8 * dtype.itemsize, 1)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device over the memory of one on the CPU."""
    memory = tensor.untyped_storage()
    with _lock:
        _array.data, _array.device = memory.data_ptr(), _Device(_OUTSIDE, device.index)
        _array.type, _array.dimensions = _type(tensor.dtype), 1
        _size[0] = memory.nbytes() // tensor.dtype.itemsize
        _array.shape, _array.strides = _size, _stride
        flat = torch._C._from_dlpack(_capsule(ctypes.addressof(_array), b"dltensor", None))
    flat.untyped_storage()._memory = memory  # lives as long as the storage
    return _like(flat, tensor)


def _like(owner: Tensor, seen: Tensor) -> Tensor:
    """Return the part of a device's storage that `seen` is of its memory."""
    if owner.dtype != seen.dtype:
        flat = torch._C._acc.create_empty_tensor((0,), seen.dtype)
        if owner.device.index:
            flat = _placed(torch.empty(0, dtype=seen.dtype), owner.device)
        size = tuple(seen.size()), seen.stride()
        return _SET.redispatch(_CPU, flat, owner.untyped_storage(), seen.storage_offset(), *size)
    return _STRIDED.redispatch(_CPU, owner, seen.size(), seen.stride(), seen.storage_offset())


def _memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU over the memory of one on a device."""
    seen = torch.empty(0, dtype=tensor.dtype)
    seen.set_(
        tensor.untyped_storage()._memory, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return seen


# The one kernel.

_STANDS_FOR = {
    "convolution_overrideable": torch.ops.aten.convolution.default,
    "convolution_backward_overrideable": torch.ops.aten.convolution_backward.default,
}


class _Plan:
    """What the schema of an operation says, read once."""

    def __init__(self, op: Any) -> None:
        schema, self.op = op._schema, op
        name = op.overloadpacket.__name__
        self.runs, self.inserts = _STANDS_FOR.get(name, op), "backward_overrideable" in name
        self.names = [a.name for a in schema.arguments]
        self.tensors = {a.name for a in schema.arguments if str(a.type) == "Tensor"}
        self.numbers = torch.Tag.pointwise in op.tags
        self.indexed = name in _INDEXED
        self.written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        self.returned = [bool(r.alias_info and r.alias_info.is_write) for r in schema.returns]
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.generator = "generator" in self.names


_plan = functools.cache(_Plan)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of a device on the CPU, after the checks of an accelerator."""
    return _Call(_plan(op), args, kwargs).run()


class _Call:
    """One call of an operation."""

    def __init__(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs.pop("pin_memory", None)
        self.plan, self.kwargs = plan, kwargs
        self.given = dict(zip(plan.names, args, strict=False)) | kwargs
        self.count = len(args)
        self.owners: dict[int, Tensor] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.device = self._device()

    def run(self) -> Any:
        """Return what the operation returns, on the device."""
        plan = self.plan
        values = [
            # A plain number in the place of a tensor loses that on its way here.
            torch.tensor(value)
            if name in plan.tensors and isinstance(value, int | float)
            else value
            for name, value in self.given.items()
        ]
        values = [self._inside(value) for value in values]
        args, kwargs = (
            values[: self.count],
            dict(zip(self.kwargs, values[self.count :], strict=True)),
        )
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if plan.inserts:
            args.insert(3, None)  # no sizes of the bias
        result = self._random(args, kwargs) if plan.random else plan.runs(*args, **kwargs)
        for tensor, seen in self.pairs:
            self._reshape(tensor, seen)
        if not plan.returned:
            return None
        written = iter([name for name in plan.names if name in plan.written])
        results = (result,) if len(plan.returned) == 1 else result
        found = [
            self.given[next(written)] if write else self._outside(value)
            for write, value in zip(plan.returned, results, strict=True)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    # On the way in.

    def _device(self) -> torch.device:
        """Return the device, after a check that all arguments are there."""
        device: torch.device | None = self.kwargs.get("device")
        if device is None:
            device = next(filter(None, map(_claim, self.given.values())), None)
            for name, value in self.given.items():
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, Tensor) and one.device != device:
                        self._check(name, one, device)
        if device is None or device.index is None:
            device = torch.device(KIND, _STATE.current)
        if self.plan.generator:
            place = _found(self.given.get("generator"))
            if place is not None and place != device:
                raise RuntimeError(
                    f"Expected a '{device}' device type for generator but found '{place}' ({self.plan.op})"
                )
        return device

    def _check(self, name: str, tensor: Tensor, device: Any) -> None:
        plan = self.plan
        number = tensor.dim() == 0 and plan.numbers and name not in plan.written
        index = plan.indexed and name == "indices"
        if tensor.device.type != "cpu" or not (number or index):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {tensor.device}! ({plan.op}, argument {name})"
            )

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != KIND:
                return value
            seen = _memory(value)
            self.owners[seen.untyped_storage()._cdata] = value
            self.pairs.append((value, seen))
            return seen
        if isinstance(value, list | tuple):
            return [self._inside(one) for one in value]
        if isinstance(value, torch.UntypedStorage):
            return value._memory
        return value

    def _random(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Let an operation without a generator draw from the device's own."""
        own = _STATE.generator(self.device)
        if self.plan.generator:
            if self.given.get("generator") is None:
                kwargs["generator"] = own
            return self.plan.runs(*args, **kwargs)
        common = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state()[:-1])
        try:
            return self.plan.runs(*args, **kwargs)
        finally:
            own.set_state(torch.cat([torch.default_generator.get_state(), _MARK]))
            torch.default_generator.set_state(common)

    # On the way out.

    def _outside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            owner = self.owners.get(value.untyped_storage()._cdata)
            return _placed(value, self.device) if owner is None else _like(owner, value)
        if isinstance(value, list | tuple):
            return [self._outside(one) for one in value]
        return value

    def _reshape(self, tensor: Tensor, seen: Tensor) -> None:
        """Give a tensor what the operation has changed besides its entries: shape, strides, storage."""
        storage, memory = tensor.untyped_storage(), seen.untyped_storage()
        if storage.nbytes() != memory.nbytes() or storage._memory._cdata != memory._cdata:
            storage = _placed(seen, self.device).untyped_storage()
        elif (tensor.shape, tensor.stride()) == (seen.shape, seen.stride()) and (
            tensor.storage_offset() == seen.storage_offset()
        ):
            return
        _SET.redispatch(
            _CPU, tensor, storage, seen.storage_offset(), list(seen.shape), seen.stride()
        )


def _claim(value: Any) -> torch.device | None:
    """Return the device of a tensor, or of one in a list, if it is a simulated one."""
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, Tensor) and one.device.type == KIND:
            return one.device
    return None


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    ends = [_memory(t) if t.device.type == KIND else t for t in (source, target)]
    ends[1].copy_(ends[0])
    return target


# Generators.

_MARK = torch.tensor([255], dtype=torch.uint8)


class _Kind(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


_generators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _found(value: Any) -> torch.device | None:
    """Return the device of a generator, which loses its class on its way to a kernel."""
    if not isinstance(value, torch._C.Generator):
        return None
    return _generators.get(value._cdata, value).device


class _Generator(torch._C.Generator, metaclass=_Kind):
    """torch.Generator, with simulated devices."""

    def __new__(cls, device: Any = "cpu") -> Any:
        place = torch.device(device)
        if place.type != KIND:
            return torch._C.Generator(place)
        made = super().__new__(cls)
        made._number = _STATE.current if place.index is None else place.index
        _generators[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(KIND, self._number)

    def get_state(self) -> Tensor:
        return torch.cat([super().get_state(), _MARK])

    def set_state(self, state: Tensor) -> Any:
        if state.device.type != "cpu" or len(state) != len(self.get_state()):
            raise RuntimeError("RNG state is wrong size: that of another device?")
        super().set_state(state[:-1])
        return self


class _Refusing(TorchDispatchMode):
    """Refuses generators of a device to operations of the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            place = _found(value)
            if place is not None and place.type == KIND:
                device = kwargs.get("device")
                if not any(map(_claim, args)) and (device is None or device.type != KIND):
                    raise RuntimeError(
                        f"Expected a 'cpu' device type for generator but found '{place}' ({func})"
                    )
        return func(*args, **kwargs)


# The devices.


class _Event:
    """torch.Event, of devices that have always done everything."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(device)

    def record(self, stream: Any = None) -> None:
        # CUDA's waits for nothing of use on another device's stream.
        assert (stream or _current_stream()).device == self.device

    def synchronize(self) -> None:
        pass


def _current_stream(device: Any = None) -> Any:
    return SimpleNamespace(device=torch.device(KIND, _STATE.current) if device is None else device)


class _State:
    """Which device is current, and the random numbers of each."""

    def __init__(self) -> None:
        self.on, self.current = False, 0
        self.defaults: list[Any] = []

    def choose(self, device: Any) -> None:
        place = torch.device(KIND, device) if isinstance(device, int) else torch.device(device)
        assert place.index in range(COUNT), device
        self.current = place.index

    def generator(self, device: Any) -> Any:
        """Return the global generator of a device."""
        return self.defaults[torch.device(device).index or 0]

    def seed(self, seed: int) -> None:
        for generator in self.defaults:
            generator.manual_seed(seed)


_STATE = _State()
_library: list[torch.library.Library] = []


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _STATE.on

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _register() -> None:
    """Tell torch of the devices, once in a process; outside the simulation they are not available."""
    if _library:
        return
    module = SimpleNamespace(
        is_initialized=lambda: True, is_available=lambda: _STATE.on, _is_in_bad_fork=lambda: False,
        device_count=lambda: COUNT if _STATE.on else 0, synchronize=lambda device=None: None,
        current_device=lambda: _STATE.current, set_device=_STATE.choose,
        manual_seed=_STATE.seed, manual_seed_all=_STATE.seed,
        get_rng_state=lambda device: _STATE.generator(device).get_state(),
        set_rng_state=lambda state, device: _STATE.generator(device).set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
    )  # fmt: skip
    _setup_privateuseone_for_python_backend(KIND, backend_module=module, hook=_Hook())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_kernel, "PrivateUse1")
    # Autocast can be asked for, and converts nothing.
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for (
        name
    ) in _STANDS_FOR:  # what has a kernel for all devices, which only says that there is none
        own.impl(
            name, functools.partial(_kernel, getattr(torch.ops.aten, name).default), "PrivateUse1"
        )
    for name in ("_copy_from", "_copy_from_and_resize"):
        own.impl(name, _copied, "PrivateUse1")
    # torch.tensor(…, device=…) inside a dispatch mode finds no fallback.
    for op in (torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format):
        own.impl(op, functools.partial(_kernel, op), "PrivateUse1")
    _library.extend([library, own])


@contextmanager
def simulated_accelerators() -> Iterator[None]:
    """Let this machine have two accelerators inside the block."""
    _register()
    common = torch.UntypedStorage.__deepcopy__

    def copied(storage: Any, memo: dict[Any, Any]) -> Any:
        if storage.device.type != KIND:
            return common(storage, memo)
        found = memo.setdefault("torch", {})
        if storage._cdata not in found:
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage._memory.clone())
            found[storage._cdata] = _placed(bytes_, storage.device).untyped_storage()
        return found[storage._cdata]

    def new_tensor(tensor: Tensor, data: Any, **how: Any) -> Tensor:
        # torch makes the tensor's device current meanwhile, which a device written in Python does not see.
        return torch._C.TensorBase.new_tensor(tensor, data, **{"device": tensor.device, **how})

    with ExitStack() as block:
        for place, name, value in (
            (torch.Tensor, "new_tensor", new_tensor),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
            (torch, "Generator", _Generator),
            (torch, "Event", _Event),
            (torch.UntypedStorage, "__deepcopy__", copied),
            (torch.accelerator, "current_stream", _current_stream),
            (torch.accelerator, "device_count", lambda: COUNT),
            (torch.accelerator, "current_device_index", lambda: _STATE.current),
            (torch.accelerator, "set_device_index", _STATE.choose),
            (_STATE, "on", True),
            (_STATE, "current", 0),
        ):
            block.enter_context(patch.object(place, name, value))
        _STATE.defaults = [_Generator(torch.device(KIND, i)).manual_seed(i) for i in range(COUNT)]
        # torch has started a thread for one device of this kind only.
        block.enter_context(torch.autograd.set_multithreading_enabled(False))
        block.enter_context(_Refusing())
        yield
