"""What the sampling methods share: when a snapshot is kept, where, and how chains follow one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes import distributed
from torchbayes.likelihood import Likelihood
from torchbayes.methods.base import Method, Plan
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Samples, Weights, snapshot
from torchbayes.prior import GaussianPrior, Prior, resnetpp_prior

__all__ = ["Collection", "SamplerMethod", "prior_called"]


def prior_called(name: str, precision: float) -> Prior:
    """N(0, 1/precision) on every weight for `gaussian`, the ATMC paper's for `resnetpp`."""
    if name == "gaussian":
        return GaussianPrior(precision=precision)
    if name == "resnetpp":
        return resnetpp_prior()
    raise ValueError(f"prior is {name!r}: expected gaussian or resnetpp")


@dataclass(frozen=True)
class Collection:
    """Which states of a chain are kept, and where.

    Args:
        burn_in: The share of the updates before the first snapshot.
        samples: The snapshots of a chain, spread evenly over the rest.
        thinning: The updates from one snapshot to the next, in place of `samples`.
        chains: The chains of a process, one after another.
        folder: Where to keep the snapshots as files; in memory if None.

    Example:
        >>> from torchbayes.methods.sampler import Collection
        >>> sorted(Collection(burn_in=0.5, samples=3).updates(100))
        [68, 84, 100]
        >>> sorted(Collection(burn_in=0.5, thinning=20).updates(100))
        [60, 80, 100]
        >>> sorted(Collection(burn_in=0.3).updates(100, cycle_ends=(25, 50, 75, 100)))
        [50, 75, 100]
    """

    burn_in: float = 0.5
    samples: int = 30
    thinning: int | None = None
    chains: int = 1
    folder: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.burn_in < 1:
            raise ValueError(
                f"burn_in is {self.burn_in:g}: expected the share of the run before the first sample, from 0 "
                "to below 1; no update would be left to sample from"
            )
        for name, value in (
            ("samples", self.samples),
            ("thinning", 1 if self.thinning is None else self.thinning),
            ("chains", self.chains),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}: expected a whole number of at least 1")

    def updates(self, total: int, cycle_ends: tuple[int, ...] = ()) -> set[int]:
        """The numbers of updates, of `total`, after which a snapshot is kept; the last is always one.

        Args:
            total: The updates of a chain.
            cycle_ends: Where cycles of the learning rate end; then the last state of each cycle is kept.
        """
        burnt = min(round(self.burn_in * total), total - 1)
        if cycle_ends:
            return {end for end in cycle_ends if end > burnt}
        left = total - burnt
        if self.thinning is not None:
            return set(range(total, burnt, -self.thinning))
        return set(range(total, burnt, -max(1, left // self.samples))[: self.samples])


class SamplerMethod(Method):
    """A method whose posterior is the states that a sampler went through.

    The first chain of the first process starts from the network as it is given, every other one from a
    fresh random start. A subclass calls `begin` with a function that makes its sampler.
    """

    one_per_rank = True

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, collection: Collection
    ) -> None:
        super().__init__(model, likelihood, plan)
        self.collection = collection
        ends = plan.schedule.cycle_ends(plan.epochs, plan.steps_per_epoch)
        self.keep = collection.updates(max(1, plan.epochs * plan.steps_per_epoch), ends)
        self.chain, self.updates = 0, 0
        self.bank = Samples(model, folder=self._folder(f"rank{plan.rank}"))

    def _folder(self, part: str) -> Path | None:
        if self.collection.folder is None:
            return None
        whole = Path(self.collection.folder)
        return whole if self.plan.world_size == 1 else whole / part

    def begin(self, make: Callable[[], Sampler]) -> None:
        """Start the first chain with the sampler that `make` makes, and later ones with others."""
        self._make = make
        if self.plan.rank > 0:
            self._restart()
        self.set_optimizer(make())

    def _restart(self) -> None:
        # From the run's generator, so that chains differ over ranks and a resumed run repeats them.
        generator = self.plan.generator
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            fresh = self.plan.new_model()
        own = [*self.model.parameters(), *self.model.buffers()]
        with torch.no_grad():
            for old, new in zip(own, [*fresh.parameters(), *fresh.buffers()], strict=True):
                old.copy_(new)

    @property
    def epochs(self) -> int:
        """The epochs of all chains of this process together."""
        return self.plan.epochs * self.collection.chains

    def begin_epoch(self, epoch: int) -> None:
        """Start the next chain once the one before it has come to its end."""
        if epoch == 0 and self.updates == 0 and len(self.bank) > 0:
            raise ValueError(
                f"{self.bank.folder} already holds {len(self.bank)} samples and there is no checkpoint of "
                "theirs to resume: choose an empty folder, or remove them"
            )
        if epoch // self.plan.epochs > self.chain:
            self.chain, self.updates = self.chain + 1, 0
            self._restart()
            self.set_optimizer(self._make())

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """One update, and a snapshot if it is one of those to keep."""
        try:
            return super().step(closure)
        finally:
            # Counts an update that was left out because float16 overflowed, too.
            self.updates += 1
            if self.updates in self.keep:
                self.bank.append()

    def posterior(self) -> Samples:
        """The snapshots of all chains, of all processes at the end; the present weights if there are none."""
        if self.plan.world_size > 1 and len(self.bank) == len(self.keep) * self.collection.chains:
            return self._pooled()
        if len(self.bank) > 0:
            return self.bank
        present = Samples(self.model)
        present.append()
        return present

    def _pooled(self) -> Samples:
        """The snapshots of all processes; those on disk in a folder that the first process writes."""
        on_disk = self.bank.folder is not None
        pooled = Samples(self.model, folder=self._folder("pooled") if self.plan.rank == 0 else None)
        pooled.truncate(0)
        for rank in range(self.plan.world_size):
            for index in range(len(self.bank)):
                mine = rank == self.plan.rank
                weights: Weights = self.bank[index] if mine else snapshot(self.model)
                distributed.broadcast(list(weights.values()), rank)
                if not on_disk or self.plan.rank == 0:
                    pooled.append(weights)
        return pooled if len(pooled) > 0 else self.bank

    def state_dict(self) -> dict[str, Any]:
        """The chain, and the snapshots so far, or their number if they are on disk."""
        kept = len(self.bank) if self.bank.folder is not None else list(self.bank)
        return super().state_dict() | {
            "chain": self.chain,
            "updates": self.updates,
            "samples": kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the same chain; snapshots that were written to disk later are dropped."""
        super().load_state_dict(state)
        self.chain, self.updates = state["chain"], state["updates"]
        if self.bank.folder is not None:
            self.bank.truncate(state["samples"])
            return
        self.bank.truncate(0)
        for weights in state["samples"]:
            self.bank.append(weights)
