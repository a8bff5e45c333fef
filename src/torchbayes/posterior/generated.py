"""Weights that small networks generate from noise: the posterior of a hypernetwork.

K. Ukai, T. Matsubara and K. Uehara, Bayesian estimation and model averaging of convolutional neural
networks by hypernetwork, NOLTA 10(1), 2019.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchbayes.posterior.latents import LATENTS, Latent
from torchbayes.posterior.posterior import Posterior, Weights, copied

__all__ = ["Generated", "hidden"]

_MEAN_LATENTS = 4096


def hidden(first: Tensor, latents: Tensor) -> Tensor:
    """Return the hidden activation relu(W1·z) of a generator, for one latent or for every row of several."""
    return torch.relu(latents @ first.t())


class Generated(Posterior):
    """An implicit distribution: w = W2·relu(W1·z) for every generated weight, z ~ p(z).

    `sample` draws a new z. In a network with batch norm every draw needs its own statistics (section 3.5 of
    the paper): `calibrated` returns a posterior that keeps some draws with theirs, and `draws`, which
    predictions average over, then yields each of those once.

    Args:
        weights: The weights that are not generated, and the buffers.
        first: W1 of every generated weight, (hidden_dim, latent_dim).
        second: W2 of every generated weight, (*weight.shape, hidden_dim).
        groups: The name of every generated weight's latent: weights with the same name share z.
        latent: The distribution p(z), such as `torchbayes.latents.normal`.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> first, second = torch.ones(4, 2), torch.ones(1, 3, 4)
        >>> q = tb.posterior.Generated({"bias": torch.zeros(1)}, {"weight": first}, {"weight": second},
        ...                  {"weight": "all"}, tb.latents.uniform_positive)
        >>> q.sample()["weight"].shape
        torch.Size([1, 3])
        >>> q
        Generated(4 weights of a model, 3 of them generated)
    """

    kind = "generated"

    def __init__(
        self, weights: Weights, first: Weights, second: Weights, groups: Mapping[str, str],
        latent: Latent, *, model_name: str = "", rest: str = "",
    ) -> None:  # fmt: skip
        if not (first.keys() == second.keys() == groups.keys()):
            raise ValueError("first, second and groups must name the same weights")
        for name, layer in first.items():
            if layer.dim() != 2 or second[name].shape[-1:] != layer.shape[:1]:
                raise ValueError(
                    f"the generator of {name!r} has shapes {tuple(layer.shape)} and "
                    f"{tuple(second[name].shape)}: expected (hidden, latent) and (…, hidden)"
                )
        self._weights, self._first, self._second = copied(weights), copied(first), copied(second)
        self.groups, self.latent = dict(groups), latent
        self.model_name, self.rest = model_name, rest
        self.members: list[tuple[Weights, Weights]] = []  # latents and buffers of the draws to keep

    @property
    def shares_statistics(self) -> bool:  # type: ignore[override]
        """Whether new draws have the statistics of training, because there are no `calibrated` ones."""
        return not self.members

    @property
    def latent_dim(self) -> int:
        """The size of z."""
        return int(next(iter(self._first.values())).shape[1])

    @property
    def generated(self) -> list[str]:
        """The names of the generated weights."""
        return list(self._first)

    def _latents(self, generator: torch.Generator | None) -> Weights:
        return {
            group: self.latent(self.latent_dim, generator)
            for group in dict.fromkeys(self.groups.values())
        }

    def _rows(self, count: int, generator: torch.Generator | None) -> Tensor:
        return torch.stack([self.latent(self.latent_dim, generator) for _ in range(count)])

    def _draw(self, latents: Weights) -> Weights:
        draw = copied(self._weights)
        for name, first in self._first.items():
            activation = hidden(first, latents[self.groups[name]].to(first))
            draw[name] = torch.matmul(self._second[name], activation)
        return draw

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Return a new draw; its batch-norm statistics are those of training, not its own."""
        return self._draw(self._latents(generator))

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """Yield the `calibrated` draws, each once; new ones if there are none."""
        if not self.members:
            yield from super().draws(count, generator)
        for latents, statistics in self.members[:count]:
            yield self._draw(latents) | copied(statistics)

    def mean(self) -> Weights:
        """Return W2·E[relu(W1·z)], the expectation over 4,096 latents of a fixed seed."""
        latents = self._rows(_MEAN_LATENTS, torch.Generator().manual_seed(0))
        result = copied(self._weights)
        for name, first in self._first.items():
            activation = hidden(first, latents.to(first)).mean(0)
            result[name] = torch.matmul(self._second[name], activation)
        return result

    def calibrated(
        self, statistics: Callable[[list[Weights]], list[Weights]], count: int,
        generator: torch.Generator | None = None,
    ) -> Generated:  # fmt: skip
        """Return the same posterior with `count` new draws kept, each with its own buffers.

        Args:
            statistics: Returns every draw with its buffers added, such as
                `lambda draws: [tb.recalibrate_batchnorm(model, draw, loader) for draw in draws]`.
            count: Number of draws.
            generator: Source of the latents.
        """
        if count < 1:
            raise ValueError(f"count is {count}: expected at least 1 draw")
        latents = [self._latents(generator) for _ in range(count)]
        draws = [self._draw(latent) for latent in latents]
        members = [
            (latent, {name: t for name, t in new.items() if t is not draw.get(name)})
            for latent, draw, new in zip(latents, draws, statistics(draws), strict=True)
        ]
        return self.with_members(members)

    def with_members(self, members: Iterable[tuple[Weights, Weights]]) -> Generated:
        """Return the same posterior with draws kept, each given by its latents and its own buffers."""
        result = copy.copy(self)
        result.members = [(copied(latents), copied(buffers)) for latents, buffers in members]
        return result

    def entries(
        self, chosen: Mapping[str, Tensor], count: int, generator: torch.Generator | None = None
    ) -> Weights:
        """Return single weights over many draws, without computing the others.

        Args:
            chosen: Indices into every generated weight, counted as in `weight.flatten()`.
            count: Number of draws.
            generator: Source of the latents.

        Returns:
            A tensor (count, indices) for every name.
        """
        latents = {
            group: self._rows(count, generator) for group in dict.fromkeys(self.groups.values())
        }
        result: Weights = {}
        for name, places in chosen.items():
            activation = hidden(self._first[name], latents[self.groups[name]].to(self._first[name]))
            rows = self._second[name].flatten(0, -2)[places]
            result[name] = activation @ rows.t()
        return result

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        return plain | {name: tuple(t.shape[:-1]) for name, t in self._second.items()}

    def _file_tensors(self) -> Mapping[str, Weights]:
        members: Weights = {}
        for number, parts in enumerate(self.members):
            for part, tensors in zip(("latent", "statistics"), parts, strict=True):
                members |= {f"{number}/{part}/{name}": t for name, t in tensors.items()}
        return {
            "weights": self._weights, "first": self._first, "second": self._second, "members": members
        }  # fmt: skip

    def _file_settings(self) -> dict[str, Any]:
        names = [name for name, latent in LATENTS.items() if latent is self.latent]
        if not names:
            raise ValueError(
                "the latent of this posterior is a custom function, which a file cannot hold: save draws of "
                "it in torchbayes.Samples, or use one of torchbayes.latents"
            )
        return {"latent": names[0], "groups": self.groups, "members": len(self.members)}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Generated:
        result = cls(
            groups.get("weights", {}), groups["first"], groups["second"], settings["groups"],
            LATENTS[settings["latent"]],
        )  # fmt: skip
        members: list[tuple[Weights, Weights]] = [({}, {}) for _ in range(settings["members"])]
        for key, tensor in groups.get("members", {}).items():
            number, part, name = key.split("/", 2)
            members[int(number)][part == "statistics"][name] = tensor
        return result.with_members(members)

    def __repr__(self) -> str:
        sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes().items()}
        random = sum(sizes[name] for name in self._second)
        return (
            f"Generated({sum(sizes.values()):,} weights of {self.model_name or 'a model'}, "
            f"{random:,} of them generated)"
        )
