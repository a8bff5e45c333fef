"""What a method has learned about the weights, in one of a few shapes that everything downstream shares.

A `Posterior` is the waist of the library: every method ends in one, and predictions, metrics and reports
start from one without knowing which method made it. A draw is a plain dictionary from the names of
`model.state_dict()` to tensors, ready for `torch.func.functional_call`.

Files are safetensors with a JSON header. Reading one never unpickles and never runs code.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchbayes.storage import PosteriorFileError, atomic_path, read_tensors, write_tensors

__all__ = [
    "Gaussian",
    "LowRankGaussian",
    "Point",
    "Posterior",
    "PosteriorFileError",
    "Samples",
    "Weights",
    "Wrapper",
    "load",
    "snapshot",
]

Weights = dict[str, Tensor]
_DRAW_FILES = "draw-[0-9]*.safetensors"


def snapshot(model: nn.Module) -> Weights:
    """Copy the parameters and buffers of `model`; a tied weight appears once, under its first name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def _copied(weights: Mapping[str, Tensor]) -> Weights:
    """Weights that later training steps of the model they came from do not change."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    device = tensor.device if generator is None else generator.device
    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=device)
    return noise.to(tensor.device)


class Wrapper(nn.Module):
    """A module around the user's network that draws, perturbs or generates its weights.

    Args:
        model: The user's network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Posterior(ABC):
    """A distribution over a network's weights.

    A subclass sets `kind`, which names it in files, and gives `mean`, `sample` and the three `_file_…`
    methods. Nothing else in the library needs to know about it.

    Attributes:
        model_name: The class name of the model, for error messages and files.
        vmappable: Whether `torch.func.vmap` may run several draws at once through `call`.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Posterior]]] = {}
    vmappable: bool = True
    model_name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind:
            Posterior.kinds[cls.kind] = cls

    @abstractmethod
    def mean(self) -> Weights:
        """The mean weights, as new tensors."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """One draw of the weights, as new tensors."""

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """At most `count` draws to average over.

        A posterior with finitely many members gives each of them once rather than some of them twice.
        """
        for _ in range(count):
            yield self.sample(generator)

    def call(self, model: nn.Module, draw: Weights, *args: Any, **kwargs: Any) -> Any:
        """Run `model` under one draw, leaving the model's own weights alone."""
        return torch.func.functional_call(model, draw, args, kwargs)

    def check(self, model: nn.Module) -> None:
        """Raise a `ValueError` that names the first weight that does not fit `model`."""
        own = {
            name: tuple(tensor.shape)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
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
                    f"{type(model).__name__} does not have: use the model that it was trained with"
                )
            if own[name] != shape:
                raise ValueError(
                    f"weight {name!r} has shape {shape} in the posterior but {own[name]} in "
                    f"{type(model).__name__}: use the model that it was trained with"
                )
        missing = [n for n, p in model.named_parameters() if n not in shapes and p.requires_grad]
        if missing:
            raise ValueError(
                f"the posterior of a {self.model_name or 'model'} has no weight {missing[0]!r}, which "
                f"{type(model).__name__} needs: use the model that it was trained with"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.mean().items()}

    # What a file holds: named groups of tensors and JSON settings.

    @abstractmethod
    def _file_tensors(self) -> Mapping[str, Weights]:
        """The tensors to save, by group."""

    def _file_settings(self) -> dict[str, Any]:
        """JSON-able settings to save."""
        return {}

    @classmethod
    @abstractmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Posterior:
        """The posterior that `_file_tensors` and `_file_settings` described."""

    def save(self, path: str | Path) -> None:
        """Write the posterior to `path`, whole or not at all.

        Args:
            path: The file to write, by custom `posterior.safetensors`.
        """
        tensors = {
            f"{group}/{name}": tensor
            for group, weights in self._file_tensors().items()
            for name, tensor in weights.items()
        }
        write_tensors(
            Path(path),
            tensors,
            kind=self.kind,
            model_name=self.model_name,
            settings=self._file_settings(),
        )

    def __repr__(self) -> str:
        count = sum(tensor.numel() for tensor in self.mean().values())
        return f"{type(self).__name__}({count:,} weights of {self.model_name or 'a model'})"


class Point(Posterior):
    """All mass on one set of weights: what ordinary training gives.

    Args:
        weights: The weights, and buffers if the draw has its own.
        model_name: The class name of the model they are of.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> point = tb.Point(tb.snapshot(model))
        >>> bool((point.sample()["weight"] == model.weight).all())
        True
    """

    kind = "point"

    def __init__(self, weights: Weights, *, model_name: str = "") -> None:
        self._weights = _copied(weights)
        self.model_name = model_name

    def mean(self) -> Weights:
        """The weights."""
        return {name: tensor.clone() for name, tensor in self._weights.items()}

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """The weights again: a point has no spread."""
        return self.mean()

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """The weights, once."""
        if count > 0:
            yield self.mean()

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._weights}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Point:
        return cls(groups["mean"])


def _check_std(mean: Weights, std: Weights) -> None:
    for name, value in std.items():
        if name not in mean:
            raise ValueError(
                f"std has a weight {name!r} that mean does not have: name the same weights"
            )
        if value.shape != mean[name].shape:
            raise ValueError(
                f"std of {name!r} has shape {tuple(value.shape)} but its mean has "
                f"{tuple(mean[name].shape)}: give one standard deviation per weight"
            )
        if not (value.is_floating_point() and mean[name].is_floating_point()):
            raise ValueError(
                f"std of {name!r} is given but the weight is of type {mean[name].dtype}, its std of "
                f"{value.dtype}: only real numbers can be drawn, so leave it out of std"
            )
        if not bool(((value >= 0) & (value < torch.inf)).all()):
            odd = value[~((value >= 0) & (value < torch.inf))][0].item()
            raise ValueError(
                f"std of {name!r} has the entry {odd:g}: standard deviations are finite and at least 0"
            )


class Gaussian(Posterior):
    """An independent Gaussian for every weight.

    Args:
        mean: The means, and buffers if the draws share some.
        std: The standard deviations. A weight that is not named here is deterministic.
        model_name: The class name of the model they are of.

    Example:
        >>> import torch, torchbayes as tb
        >>> q = tb.Gaussian({"weight": torch.zeros(1, 3)}, {"weight": torch.ones(1, 3)})
        >>> q.sample(torch.Generator().manual_seed(0))["weight"].shape
        torch.Size([1, 3])
    """

    kind = "gaussian"

    def __init__(self, mean: Weights, std: Weights, *, model_name: str = "") -> None:
        _check_std(mean, std)
        self._mean = _copied(mean)
        self._std = _copied(std)
        self.model_name = model_name

    def mean(self) -> Weights:
        """The means."""
        return {name: tensor.clone() for name, tensor in self._mean.items()}

    def std(self) -> Weights:
        """The standard deviations of the weights that have one."""
        return {name: tensor.clone() for name, tensor in self._std.items()}

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + std · ε."""
        draw: Weights = {}
        for name, mean in self._mean.items():
            std = self._std.get(name)
            if std is None:
                draw[name] = mean.clone()
            else:
                draw[name] = _normal_like(mean, generator).mul_(std).add_(mean)
        return draw

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "std": self._std}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Gaussian:
        return cls(groups["mean"], groups.get("std", {}))


class LowRankGaussian(Posterior):
    """A Gaussian with covariance diag(std²) + D Dᵀ, where D has a few columns.

    Args:
        mean: The means, and buffers if the draws share some.
        std: The diagonal part's standard deviations; a weight that is not named has none.
        factors: For each weight a tensor of shape (rank, *weight.shape): the columns of D, already
            scaled. One set of `rank` normal numbers moves all weights together.
        model_name: The class name of the model they are of.

    Example:
        >>> import torch, torchbayes as tb
        >>> mean = {"weight": torch.zeros(3)}
        >>> q = tb.LowRankGaussian(mean, {"weight": torch.zeros(3)}, {"weight": torch.ones(1, 3)})
        >>> w = q.sample()["weight"]
        >>> bool((w == w[0]).all())   # one direction only: the three weights move together
        True
    """

    kind = "low-rank-gaussian"

    def __init__(
        self, mean: Weights, std: Weights, factors: Weights, *, model_name: str = ""
    ) -> None:
        _check_std(mean, std)
        for name, factor in factors.items():
            if not factor.dim() or name not in mean or factor.shape[1:] != mean[name].shape:
                raise ValueError(
                    f"factor {name!r} has shape {tuple(factor.shape)}: expected (rank, *shape of the mean)"
                )
        ranks = {factor.shape[0] for factor in factors.values()}
        if len(ranks) > 1:
            raise ValueError(f"factors have ranks {sorted(ranks)}: give every weight the same rank")
        self._mean = _copied(mean)
        self._std = _copied(std)
        self._factors = _copied(factors)
        self.rank = ranks.pop() if ranks else 0
        self.model_name = model_name

    def mean(self) -> Weights:
        """The means."""
        return {name: tensor.clone() for name, tensor in self._mean.items()}

    def std(self) -> Weights:
        """The marginal standard deviations: the root of the covariance's diagonal."""
        result: Weights = {}
        for name in self._mean:
            if name not in self._std and name not in self._factors:
                continue
            variance = torch.zeros_like(self._mean[name])
            if name in self._std:
                variance += self._std[name].square()
            if name in self._factors:
                variance += self._factors[name].square().sum(0)
            result[name] = variance.sqrt_()
        return result

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw mean + std · ε + D ζ."""
        coefficients: Tensor | None = None
        draw: Weights = {}
        for name, mean in self._mean.items():
            value = mean.clone()
            std, factor = self._std.get(name), self._factors.get(name)
            if std is not None:
                value.addcmul_(_normal_like(mean, generator), std)
            if factor is not None:
                if coefficients is None:
                    coefficients = _normal_like(factor.new_empty(self.rank), generator)
                zeta = coefficients.to(factor)
                value += torch.tensordot(zeta, factor, dims=1)
            draw[name] = value
        return draw

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {"mean": self._mean, "std": self._std, "factors": self._factors}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> LowRankGaussian:
        return cls(groups["mean"], groups.get("std", {}), groups.get("factors", {}))


class Samples(Posterior):
    """A bank of weight snapshots: the members of an ensemble or the states of a chain.

    Args:
        model: The network that `append()` takes its snapshots of, with its buffers.
        folder: Keep the snapshots as files in this folder and read them one at a time, for banks that
            do not fit in memory. A folder that already has snapshots is continued.

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

    def __init__(self, model: nn.Module | None = None, *, folder: str | Path | None = None) -> None:
        self._model = model
        self._memory: list[Weights] = []
        self.folder = None if folder is None else Path(folder)
        self.model_name = "" if model is None else type(model).__name__
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

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"draw-{index:06d}.safetensors"

    def append(self, weights: Weights | None = None) -> None:
        """Add a snapshot of the model, or the given weights."""
        if weights is None:
            if self._model is None:
                raise ValueError(
                    "append() has nothing to take a snapshot of: make Samples(model) or pass weights"
                )
            weights = snapshot(self._model)
        self._check_like_first(weights)
        if self.folder is None:
            self._memory.append(_copied(weights))
        else:
            named = {f"mean/{name}": tensor for name, tensor in weights.items()}
            write_tensors(
                self._file(self._count),
                named,
                kind=Point.kind,
                model_name=self.model_name,
                settings={},
            )
        self._count += 1

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
        """Forget all snapshots after the first `count`, so that a resumed run can add its own."""
        if not 0 <= count <= self._count:
            raise ValueError(f"cannot keep {count} of {self._count} snapshots")
        if self.folder is None:
            del self._memory[count:]
        else:
            for index in reversed(range(count, self._count)):
                self._file(index).unlink()
        self._count = count
        if count == 0:
            self._first_shapes = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Weights:
        if not -self._count <= index < self._count:
            raise IndexError(f"snapshot {index} of {self._count} does not exist")
        index %= self._count
        if self.folder is None:
            return {name: tensor.clone() for name, tensor in self._memory[index].items()}
        point = load(self._file(index))
        return point.mean()

    def __iter__(self) -> Iterator[Weights]:
        return (self[index] for index in range(self._count))

    def _need_one(self) -> None:
        if self._count == 0:
            raise ValueError("these Samples are empty: append() at least one snapshot first")

    def mean(self) -> Weights:
        """The average of the snapshots; a buffer of whole numbers is taken from the last one.

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
                    # In half precision the later of many snapshots would be rounded away.
                    tensor = tensor.float()
                if index == 0 or not tensor.is_floating_point():
                    total[name] = tensor
                else:
                    total[name].lerp_(tensor, 1 / (index + 1))
        return {name: tensor.to(types[name]) for name, tensor in total.items()}

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """One of the snapshots, each with equal chance."""
        self._need_one()
        device = "cpu" if generator is None else generator.device
        index = torch.randint(self._count, (1,), generator=generator, device=device)
        return self[int(index)]

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """Every snapshot once if `count` allows it, else `count` different ones."""
        self._need_one()
        if count >= self._count:
            yield from self
            return
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(self._count, generator=generator, device=device)
        for index in sorted(order[:count].tolist()):
            yield self[index]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        self._need_one()
        if self._first_shapes is None:
            self._first_shapes = {name: tuple(tensor.shape) for name, tensor in self[0].items()}
        return self._first_shapes

    def save(self, path: str | Path) -> None:
        """Write one file, or for a bank that lives in a folder a folder of files.

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
            # The first draw last: a copy that was cut short has a gap, which a reader sees.
            for index in reversed(range(self._count)):
                source = self._file(index)
                with atomic_path(path / source.name) as temporary:
                    shutil.copyfile(source, temporary)

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {f"{index:06d}": weights for index, weights in enumerate(self._memory)}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Samples:
        samples = cls()
        for group in sorted(groups):
            samples.append(groups[group])
        return samples

    def __repr__(self) -> str:
        where = "in memory" if self.folder is None else f"in {self.folder}"
        return f"Samples({self._count} snapshots of {self.model_name or 'a model'}, {where})"


def load(path: str | Path, model: nn.Module | None = None) -> Posterior:
    """Read a posterior that `save` wrote.

    Args:
        path: The file, or the folder of a `Samples` bank.
        model: If given, the posterior must fit this model.

    Raises:
        PosteriorFileError: If the file is missing, cut short, damaged, not a posterior, written by a
            newer version, or of another model. The message says which.

    Example:
        >>> import tempfile, torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tb.Point(tb.snapshot(model)).save(f"{folder}/posterior.safetensors")
        ...     tb.load(f"{folder}/posterior.safetensors", model)
        Point(3 weights of a model)
    """
    path = Path(path)
    posterior: Posterior
    if path.is_dir():
        posterior = Samples(folder=path)
        if len(posterior) == 0:
            raise PosteriorFileError(
                f"{path} has no draw-000000.safetensors: it is not a bank of samples"
            )
        posterior.model_name = read_tensors(path / "draw-000000.safetensors")[0]["model"]
    else:
        header, tensors = read_tensors(path)
        if header.get("kind") not in Posterior.kinds:
            raise PosteriorFileError(
                f"{path} holds a posterior of kind {header.get('kind')!r}; this torchbayes knows "
                f"{', '.join(sorted(Posterior.kinds))}: upgrade torchbayes"
            )
        groups: dict[str, Weights] = {}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        try:
            posterior = Posterior.kinds[header["kind"]]._from_file(groups, header["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise PosteriorFileError(
                f"{path} says it is a {header['kind']!r} posterior but its contents do not fit ({error})"
            ) from error
        posterior.model_name = header["model"]
    if model is not None:
        try:
            posterior.check(model)
        except ValueError as error:
            raise PosteriorFileError(f"{path} does not fit the model: {error}") from error
    return posterior
