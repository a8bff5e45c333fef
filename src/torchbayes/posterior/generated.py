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
    """The hidden activation relu(W1·z) of a generator, for one latent or for a row of them each."""
    return torch.relu(latents @ first.t())


class Generated(Posterior):
    """An implicit distribution: w = W2·relu(W1·z) for every generated weight, z ~ p(z).

    `sample` takes a fresh z. In a network with batch norm every draw needs statistics of its own
    (section 3.5 of the paper): `calibrated` gives a posterior that keeps some draws with theirs, and
    `draws`, which predictions average over, then gives those, each once.

    Args:
        weights: The weights that are not generated, and the buffers.
        first: W1 of every generated weight, (hidden_dim, latent_dim).
        second: W2 of every generated weight, the weight's own shape and hidden_dim after it.
        groups: For every generated weight the name of its latent: weights with the same one share z.
        latent: The distribution p(z), such as `torchbayes.latents.normal`.
        model_name: The class name of the model they are of.

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
        self,
        weights: Weights,
        first: Weights,
        second: Weights,
        groups: Mapping[str, str],
        latent: Latent,
        *,
        model_name: str = "",
    ) -> None:
        if not (first.keys() == second.keys() == groups.keys()):
            raise ValueError("first, second and groups have to name the same weights")
        for name, layer in first.items():
            if layer.dim() != 2 or second[name].shape[-1:] != layer.shape[:1]:
                raise ValueError(
                    f"the generator of {name!r} has shapes {tuple(layer.shape)} and "
                    f"{tuple(second[name].shape)}: expected (hidden, latent) and (…, hidden)"
                )
        self._weights, self._first, self._second = copied(weights), copied(first), copied(second)
        self.groups = dict(groups)
        self.latent = latent
        self.model_name = model_name
        self.members: list[tuple[Weights, Weights]] = []  # latents and buffers of draws to keep

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

    def _draw(self, latents: Weights) -> Weights:
        draw = {name: tensor.clone() for name, tensor in self._weights.items()}
        for name, first in self._first.items():
            activation = hidden(first, latents[self.groups[name]].to(first))
            draw[name] = torch.matmul(self._second[name], activation)
        return draw

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """One fresh draw; its batch-norm statistics are the training's, not its own."""
        return self._draw(self._latents(generator))

    def draws(self, count: int, generator: torch.Generator | None = None) -> Iterator[Weights]:
        """The draws that were `calibrated`, each once; fresh ones if there are none."""
        if not self.members:
            yield from super().draws(count, generator)
        for latents, statistics in self.members[:count]:
            yield self._draw(latents) | copied(statistics)

    def mean(self) -> Weights:
        """W2·E[relu(W1·z)], the expectation over 4,096 latents of a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        latents = torch.stack(
            [self.latent(self.latent_dim, generator) for _ in range(_MEAN_LATENTS)]
        )
        result = {name: tensor.clone() for name, tensor in self._weights.items()}
        for name, first in self._first.items():
            activation = hidden(first, latents.to(first)).mean(0)
            result[name] = torch.matmul(self._second[name], activation)
        return result

    def calibrated(
        self,
        statistics: Callable[[list[Weights]], list[Weights]],
        count: int,
        generator: torch.Generator | None = None,
    ) -> Generated:
        """The same posterior with `count` fresh draws kept that have buffers of their own.

        Args:
            statistics: Gives every draw back with its buffers added, such as
                `lambda draws: [tb.recalibrate_batchnorm(model, draw, loader) for draw in draws]`.
            count: The number of draws.
            generator: The source of the latents.
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
        """The same posterior with draws kept, each given by its latents and its own buffers."""
        result = copy.copy(self)
        result.members = [(copied(latents), copied(buffers)) for latents, buffers in members]
        return result

    def entries(
        self,
        chosen: Mapping[str, Tensor],
        count: int,
        generator: torch.Generator | None = None,
    ) -> Weights:
        """Single weights over many draws, without making the rest of them.

        Args:
            chosen: The places to look at in every generated weight, counted as in `weight.flatten()`.
            count: The number of draws.
            generator: The source of the latents.

        Returns:
            For every name a tensor (count, places).
        """
        latents = {
            group: torch.stack([self.latent(self.latent_dim, generator) for _ in range(count)])
            for group in dict.fromkeys(self.groups.values())
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
            "weights": self._weights,
            "first": self._first,
            "second": self._second,
            "members": members,
        }

    def _file_settings(self) -> dict[str, Any]:
        names = [name for name, latent in LATENTS.items() if latent is self.latent]
        if not names:
            raise ValueError(
                "the latent of this posterior is a function of your own, which a file cannot hold: save "
                "draws of it in torchbayes.Samples, or use one of torchbayes.latents"
            )
        return {"latent": names[0], "groups": self.groups, "members": len(self.members)}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> Generated:
        result = cls(
            groups.get("weights", {}),
            groups["first"],
            groups["second"],
            settings["groups"],
            LATENTS[settings["latent"]],
        )
        kept = groups.get("members", {})
        return result.with_members(
            (_below(kept, f"{number}/latent/"), _below(kept, f"{number}/statistics/"))
            for number in range(settings["members"])
        )

    def __repr__(self) -> str:
        sizes = {name: torch.Size(shape).numel() for name, shape in self._shapes().items()}
        random = sum(sizes[name] for name in self._second)
        return (
            f"Generated({sum(sizes.values()):,} weights of {self.model_name or 'a model'}, "
            f"{random:,} of them generated)"
        )


def _below(tensors: Weights, prefix: str) -> Weights:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
