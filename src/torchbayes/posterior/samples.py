"""A bank of weight snapshots, in memory or in a folder that is read one at a time."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.core.errors import WriteError
from torchbayes.core.names import named_weights, unwrapped
from torchbayes.core.parameters import Params, selected
from torchbayes.core.reading import read_json
from torchbayes.core.shards import refuse_sharded
from torchbayes.core.storage import (
    PosteriorFileError,
    atomic_path,
    read_header,
    read_tensors,
    remove_strays,
    write_json,
    write_tensors,
)
from torchbayes.posterior.partial import digest_of_rest, held_names
from torchbayes.posterior.point import Point
from torchbayes.posterior.posterior import Posterior, Weights, copied, lent, snapshot

__all__ = ["Samples"]

_DRAW_FILES = "draw-[0-9]*.safetensors"
_MANIFEST = "bank.json"
_ENTRY = ("number", "chain", "crc32")
_REMEDY = "copy the whole folder again"


_Entry = dict[str, Any]
"""Number, chain and checksum of a draw."""


def _name(number: int) -> str:
    return f"draw-{number:06d}.safetensors"


def _checked(manifest: Path) -> dict[str, Any]:
    """Read a manifest and check its form."""
    try:
        contents = read_json(manifest, _REMEDY)
        numbers = [contents["next"], *(e[k] for e in contents["draws"] for k in _ENTRY)]
        fine = all(type(n) is int and n >= 0 for n in numbers)
        if not fine or any(set(e) != set(_ENTRY) for e in contents["draws"]):
            raise ValueError("its entries are not those of draws")
    except (ValueError, KeyError, TypeError) as error:
        raise PosteriorFileError(f"{manifest} is damaged ({error}): {_REMEDY}") from error
    result: dict[str, Any] = contents
    return result


class Samples(Posterior):
    """A bank of weight snapshots: the members of an ensemble or the states of a chain.

    Args:
        model: The network whose weights `append()` copies, with the buffers that change in training.
        params: Which weights: names or patterns (`"head.*"`), modules or parameters; all that require a
            gradient if None. The others are not copied, and must not change from one snapshot to the next:
            `rest` is their digest.
        folder: Keep the snapshots as files in this folder and read them one at a time, for banks that
            do not fit in memory. A folder that already has snapshots is continued. Its bank.json lists
            them: a file that is not in it is no snapshot.
        rest: For snapshots that are passed to `append`: `digest_of_rest` of their model, if they hold some
            of its weights only.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> samples = tb.Samples(model)
        >>> for _ in range(3):
        ...     _ = torch.nn.init.normal_(model.weight)
        ...     samples.append()
        >>> len(samples)
        3
    """

    kind = "samples"
    shares_statistics = False
    _lends_own = True

    def __init__(
        self, model: nn.Module | None = None, *, params: Params | None = None,
        folder: str | Path | None = None, rest: str = "",
    ) -> None:  # fmt: skip
        self._model, self.rest = model, rest
        self._trained: set[str] | None = None
        if model is not None and params is not None:
            self._trained = set(selected(model, params))
        if model is not None and folder is not None:
            refuse_sharded(
                model.parameters(),
                f"{type(model).__name__} is sharded (fully_shard), and all processes would write the same "
                "files: leave folder out, or append the weights of torchbayes.snapshot(model), which all "
                "processes take, to a bank that one of them has",
            )
        self._held: list[str] = [] if model is None else held_names(model, self._trained)
        self._memory: list[Weights] = []
        self._memory_chains: list[int] = []
        self.folder = None if folder is None else Path(folder)
        self.model_name = "" if model is None else type(unwrapped(model)).__name__
        self._count = 0
        self._first_shapes: dict[str, tuple[int, ...]] | None = None
        self._entries: list[_Entry] = []
        self._next = 0
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise WriteError.of(self.folder, error) from error
            self._read_manifest()
            if self._count:
                header = self._read(0)[0]
                self.model_name = header["model"]
                self.rest = str(header["settings"].get("rest", ""))

    @classmethod
    def of(cls, networks: Iterable[nn.Module]) -> Samples:
        """Return the snapshots of several trained networks of one kind: an ensemble as it is.

        Args:
            networks: The networks, whose weights are copied.

        Example:
            >>> import torch, torchbayes as tb
            >>> tb.Samples.of([torch.nn.Linear(2, 1) for _ in range(3)])
            Samples(3 snapshots of Linear, in memory)
        """
        samples = cls()
        for network in networks:
            samples.append(snapshot(network))
            samples.model_name = type(network).__name__
        return samples

    def _read_manifest(self) -> None:
        assert self.folder is not None
        file = self.folder / _MANIFEST
        if file.exists():
            self._take(_checked(file))
            return
        # A bank from before there were manifests: its draws are numbered without a gap.
        found = {path.name for path in self.folder.glob(_DRAW_FILES)}
        while _name(self._count) in found:
            header = read_header(self.folder / _name(self._count)) or {}
            settings = header.get("settings")
            chain = settings.get("chain", 0) if isinstance(settings, dict) else 0
            self._entries.append(
                {"number": self._count, "chain": chain, "crc32": header.get("crc32")}
            )
            self._count += 1
        self._next = self._count
        if self._count != len(found):
            raise PosteriorFileError(
                f"{self.folder} has {len(found)} draws but no {_name(self._count)}: copy the "
                "whole folder again, or remove the draws after the gap"
            )

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / _name(self._entries[index]["number"])

    def contents(self) -> dict[str, Any]:
        """Return what bank.json holds: the list of the snapshots, and the number of the next one."""
        return {"next": self._next, "draws": [dict(entry) for entry in self._entries]}

    def restore(self, contents: Mapping[str, Any]) -> None:
        """Return a bank in a folder to an earlier list of snapshots, so that a resumed run can add its own.

        Args:
            contents: Result of `contents`.

        Raises:
            PosteriorFileError: If a file of a snapshot is missing.
        """
        before = self.contents()
        self._take(contents)
        if self.contents() != before:
            self._write_manifest()

    def _take(self, contents: Mapping[str, Any]) -> None:
        assert self.folder is not None
        entries = [dict(entry) for entry in contents["draws"]]
        there = {path.name for path in self.folder.glob(_DRAW_FILES)}
        missing = next((e["number"] for e in entries if _name(e["number"]) not in there), None)
        if missing is not None:
            raise PosteriorFileError(
                f"{self.folder} should have {len(entries)} draws but has no {_name(missing)}: {_REMEDY}"
            )
        self._entries, self._next, self._count = entries, int(contents["next"]), len(entries)
        self._first_shapes = None

    def _write_manifest(self) -> None:
        assert self.folder is not None
        write_json(self.folder / _MANIFEST, self.contents())

    def tidy(self) -> None:
        """Remove files that are in the folder but not in the bank: what a kill or a broken chain left."""
        if self.folder is None:
            return
        remove_strays(self.folder)
        own = {_name(entry["number"]) for entry in self._entries}
        for file in self.folder.glob(_DRAW_FILES):
            if file.name not in own:
                with contextlib.suppress(OSError):  # it is no draw anyway
                    file.unlink(missing_ok=True)

    def append(self, weights: Weights | None = None, *, chain: int = 0) -> None:
        """Add a snapshot of the model, or the given weights, under the number of its chain."""
        if weights is None:
            weights = self.current()
        elif self._count == 0 and self._model is not None and not self.rest:
            self.rest = digest_of_rest(self._model, weights)
        self._check_like_first(weights)
        if self.folder is None:
            self._memory.append(copied(weights))
            self._memory_chains.append(chain)
        else:
            if not (self.folder / _MANIFEST).exists():
                self._write_manifest()  # without one, the file alone would count
            named = {f"mean/{name}": tensor for name, tensor in weights.items()}
            crc = write_tensors(
                self.folder / _name(self._next), named, kind=Point.kind, model_name=self.model_name,
                settings={"chain": chain} | ({"rest": self.rest} if self.rest else {}),
            )  # fmt: skip
            self._entries.append({"number": self._next, "chain": chain, "crc32": crc})
            self._next += 1
            self._write_manifest()
        self._count += 1

    def current(self) -> Weights:
        """Return a copy of what the bank holds of the model, as it is now."""
        if self._model is None:
            raise ValueError(
                "append() has no model to take a snapshot of: create Samples(model) or pass weights"
            )
        model = self._model
        if self._count > 0:
            self._held = list(self._shapes())
        else:
            # Which buffers training changes shows in the modules' mode, now or when the bank was made.
            self._held = held_names(model, self._trained, self._held)
        own = named_weights(model)
        missing = next((name for name in self._held if name not in own), None)
        if missing is not None:
            raise ValueError(
                f"this bank holds a weight {missing!r}, which {type(model).__name__} does not have: keep "
                "one bank (and folder) per model"
            )
        rest = digest_of_rest(model, self._held)
        if self._count == 0:
            self.rest = rest
        elif rest != self.rest:
            raise ValueError(
                "weights or buffers that these Samples do not hold have changed since the first snapshot: "
                "set requires_grad on all that is trained, and let the rest be in eval mode"
            )
        return snapshot(model, self._held)

    def _check_like_first(self, weights: Weights) -> None:
        if self._count == 0:
            return
        new = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        first = self._shapes()
        odd = next((n for n in [*first, *new] if new.get(n) != first.get(n)), None)
        if odd is not None:
            raise ValueError(
                f"weight {odd!r} has shape {new.get(odd)} in this snapshot but {first.get(odd)} in the first "
                "one: keep one bank (and folder) per model"
            )

    def truncate(self, count: int) -> None:
        """Drop all snapshots after the first `count`, so that a resumed run can add its own."""
        if not 0 <= count <= self._count:
            raise ValueError(f"cannot keep {count} of {self._count} snapshots")
        if self.folder is None:
            del self._memory[count:], self._memory_chains[count:]
        else:
            dropped = [self._file(index) for index in range(count, self._count)]
            del self._entries[count:]
            self._next = max((entry["number"] for entry in self._entries), default=-1) + 1
            self._write_manifest()
            for file in dropped:
                with contextlib.suppress(OSError):  # it is no draw any more
                    file.unlink(missing_ok=True)
        self._count = count
        if count == 0:
            self._first_shapes = None

    def drop_chain(self, chain: int) -> int:
        """Leave out the snapshots of a chain and return how many there were.

        In a folder their files stay until `tidy`: a checkpoint may still count them.
        """
        keep = [index for index, own in enumerate(self.chains) if own != chain]
        dropped = self._count - len(keep)
        if self.folder is None:
            self._memory = [self._memory[index] for index in keep]
            self._memory_chains = [self._memory_chains[index] for index in keep]
        elif dropped:
            self._entries = [self._entries[index] for index in keep]
            self._write_manifest()
        self._count = len(keep)
        if not keep:
            self._first_shapes = None
        return dropped

    @property
    def chains(self) -> list[int]:
        """The chain number of each snapshot."""
        if self.folder is None:
            return list(self._memory_chains)
        return [int(entry["chain"]) for entry in self._entries]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Weights:
        if not -self._count <= index < self._count:
            raise IndexError(f"snapshot {index} of {self._count} does not exist")
        index %= self._count
        if self.folder is None:
            return copied(self._memory[index])
        _, tensors = self._read(index)
        # Copies: the tensors are mapped from the file and would change if it were rewritten.
        return copied({name.removeprefix("mean/"): tensor for name, tensor in tensors.items()})

    def _read(self, index: int) -> tuple[dict[str, Any], Weights]:
        """Read the file of a snapshot and check that it is the one that the manifest lists."""
        header, tensors = read_tensors(self._file(index))
        if header["crc32"] != self._entries[index]["crc32"]:
            raise PosteriorFileError(
                f"{self._file(index)} is another draw than the one that bank.json lists: {_REMEDY}"
            )
        return header, tensors

    def __iter__(self) -> Iterator[Weights]:
        return (self[index] for index in range(self._count))

    def _need_one(self) -> None:
        if self._count == 0:
            raise ValueError("these Samples are empty: append() at least one snapshot first")

    def mean(self) -> Weights:
        """Return the average of the snapshots; integer buffers are those of the last one.

        An average of batch-norm statistics does not belong to the averaged weights: call
        `recalibrate_batchnorm` before using it.
        """
        self._need_one()
        total: Weights = {}
        types: dict[str, torch.dtype] = {}
        for index, weights in enumerate(self):
            for name, tensor in weights.items():
                types[name] = tensor.dtype
                if tensor.is_floating_point() and tensor.element_size() < 4:
                    # In half precision the contribution of later snapshots would be rounded away.
                    tensor = tensor.float()
                if index == 0 or not tensor.is_floating_point():
                    total[name] = tensor
                else:
                    total[name].lerp_(tensor, 1 / (index + 1))
        return {name: tensor.to(types[name]) for name, tensor in total.items()}

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Return one of the snapshots, all equally likely."""
        self._need_one()
        device = "cpu" if generator is None else generator.device
        index = torch.randint(self._count, (1,), generator=generator, device=device)
        return self[int(index)]

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """Yield every snapshot once if `count` allows it, otherwise `count` different ones."""
        return (self[index] for index in self._chosen(count, generator))

    def _lent(
        self, count: int, generator: torch.Generator | None, *, reuse: bool
    ) -> Iterator[Weights]:
        # A subclass may draw differently; a file may be rewritten.
        if type(self) is not Samples or self.folder is not None:
            return self.draws(count, generator)
        return (lent(self._memory[index]) for index in self._chosen(count, generator))

    def _chosen(self, count: int, generator: torch.Generator | None) -> list[int]:
        self._need_one()
        if count >= self._count:
            return list(range(self._count))
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(self._count, generator=generator, device=device)
        chosen: list[int] = sorted(order[:count].tolist())
        return chosen

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        self._need_one()
        if self._first_shapes is None:
            self._first_shapes = {name: tuple(tensor.shape) for name, tensor in self[0].items()}
        return self._first_shapes

    def save(self, path: str | Path) -> None:
        """Write one file, or a folder of files for a bank that is kept in a folder.

        Args:
            path: The file or folder to write.
        """
        self._need_one()
        path = Path(path)
        if self.folder is None:
            super().save(path)
        elif path.resolve() != self.folder.resolve():
            # The manifest first without and last with the draws: an interrupted copy is an empty bank.
            write_json(path / _MANIFEST, {"next": 0, "draws": []})
            remove_strays(path)
            for old in sorted(path.glob(_DRAW_FILES)):
                with contextlib.suppress(OSError):  # it is no draw any more
                    old.unlink()
            for index in range(self._count):
                source = self._file(index)
                with atomic_path(path / source.name) as temporary:
                    shutil.copyfile(source, temporary)
            write_json(path / _MANIFEST, self.contents())

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {f"{index:06d}": weights for index, weights in enumerate(self._memory)}

    def _file_settings(self) -> dict[str, Any]:
        return {"chains": self._memory_chains}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Samples:
        samples = cls()
        chains = settings.get("chains", [0] * len(groups))
        for group, chain in zip(sorted(groups), chains, strict=True):
            samples.append(groups[group], chain=int(chain))
        return samples

    def __repr__(self) -> str:
        where = "in memory" if self.folder is None else f"in {self.folder}"
        return f"Samples({self._count} snapshots of {self.model_name or 'a model'}, {where})"
