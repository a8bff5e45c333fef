"""A bank of weight snapshots, in memory or in a folder that is read one at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbayes.core.names import named_weights, unwrapped
from torchbayes.core.parameters import Params, selected
from torchbayes.core.storage import PosteriorFileError, atomic_path, read_tensors, write_tensors
from torchbayes.posterior.partial import digest_of_rest, held_names
from torchbayes.posterior.point import Point
from torchbayes.posterior.posterior import Posterior, Weights, copied, lent, snapshot

__all__ = ["Samples"]

_DRAW_FILES = "draw-[0-9]*.safetensors"


class Samples(Posterior):
    """A bank of weight snapshots: the members of an ensemble or the states of a chain.

    Args:
        model: The network whose weights `append()` copies, with the buffers that change in training.
        params: Which weights: names or patterns (`"head.*"`), modules or parameters; all that require a
            gradient if None. The others are not copied, and must not change from one snapshot to the next:
            `rest` is their digest.
        folder: Keep the snapshots as files in this folder and read them one at a time, for banks that
            do not fit in memory. A folder that already has snapshots is continued.
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
    _lends_own = True

    def __init__(
        self, model: nn.Module | None = None, *, params: Params | None = None,
        folder: str | Path | None = None, rest: str = "",
    ) -> None:  # fmt: skip
        self._model, self.rest = model, rest
        self._trained: set[str] | None = None
        if model is not None and params is not None:
            self._trained = set(selected(model, params))
        self._held: list[str] = [] if model is None else held_names(model, self._trained)
        self._memory: list[Weights] = []
        self._memory_chains: list[int] = []
        self.folder = None if folder is None else Path(folder)
        self.model_name = "" if model is None else type(unwrapped(model)).__name__
        self._count = 0
        self._first_shapes: dict[str, tuple[int, ...]] | None = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = {path.name for path in self.folder.glob(_DRAW_FILES)}
            while self._file(self._count).name in found:
                self._count += 1
            if self._count != len(found):
                raise PosteriorFileError(
                    f"{self.folder} has {len(found)} draws but no {self._file(self._count).name}: copy the "
                    "whole folder again, or remove the draws after the gap"
                )
            if self._count:
                header = read_tensors(self._file(0))[0]
                self.model_name = header["model"]
                self.rest = str(header["settings"].get("rest", ""))

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"draw-{index:06d}.safetensors"

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
            named = {f"mean/{name}": tensor for name, tensor in weights.items()}
            write_tensors(
                self._file(self._count), named, kind=Point.kind, model_name=self.model_name,
                settings={"chain": chain} | ({"rest": self.rest} if self.rest else {}),
            )  # fmt: skip
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
            for index in reversed(range(count, self._count)):
                self._file(index).unlink()
        self._count = count
        if count == 0:
            self._first_shapes = None

    @property
    def chains(self) -> list[int]:
        """The chain number of each snapshot."""
        if self.folder is None:
            return list(self._memory_chains)
        headers = (read_tensors(self._file(index))[0] for index in range(self._count))
        return [int(header["settings"].get("chain", 0)) for header in headers]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Weights:
        if not -self._count <= index < self._count:
            raise IndexError(f"snapshot {index} of {self._count} does not exist")
        index %= self._count
        if self.folder is None:
            return copied(self._memory[index])
        _, tensors = read_tensors(self._file(index))
        # Copies: the tensors are mapped from the file and would change if it were rewritten.
        return copied({name.removeprefix("mean/"): tensor for name, tensor in tensors.items()})

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
            for old in sorted(path.glob(_DRAW_FILES)):
                old.unlink()
            # The first draw last: an interrupted copy has a gap, which a reader detects.
            for index in reversed(range(self._count)):
                source = self._file(index)
                with atomic_path(path / source.name) as temporary:
                    shutil.copyfile(source, temporary)

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
