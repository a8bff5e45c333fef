"""Sampling methods: when a snapshot is kept, where, and how several chains are run."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.core.batch import as_labels, network_dtype, split_batch, suited
from torchbayes.core.device import forked_random_numbers, generator_state
from torchbayes.core.late import Late, LateError
from torchbayes.core.parameters import trainable
from torchbayes.likelihood import Likelihood
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Samples, Weights, held_names, snapshot
from torchbayes.posterior.posterior import assign
from torchbayes.train.failures import TrainingError
from torchbayes.train.method import Method, Plan
from torchbayes.train.noise import LearnedNoise
from torchbayes.train.stacked_chains import StackedChains, StackedPrior
from torchbayes.train.traces import Tracer

_LOG = logging.getLogger("torchbayes")

# Networks with at most so many weights are trained as several chains side by side by default.
_SMALL, _CHAINS = 20_000, 4
_NOTHING = "every chain broke down, so there are no samples: use a smaller lr or average_step"

__all__ = ["Collection", "SamplerMethod", "restart"]


@dataclass(frozen=True)
class Collection:
    """Decides which states of a chain are kept.

    Args:
        burn_in: Share of the updates before the first snapshot.
        samples: Snapshots of a chain, spread evenly over the rest.
        thinning: Updates from one snapshot to the next, in place of `samples`.

    Example:
        >>> from torchbayes.train.chains import Collection
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

    def __post_init__(self) -> None:
        if not 0 <= self.burn_in < 1:
            raise ValueError(
                f"burn_in is {self.burn_in:g}: expected the share of the run before the first sample, from 0 "
                "to below 1; no update would be left to sample from"
            )
        for name, value in (
            ("samples", self.samples),
            ("thinning", 1 if self.thinning is None else self.thinning),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}: expected a whole number of at least 1")

    def updates(self, total: int, cycle_ends: tuple[int, ...] = ()) -> set[int]:
        """Return the updates, of `total`, after which a snapshot is kept; the last is always one.

        Args:
            total: Number of updates of a chain.
            cycle_ends: Where cycles of the learning rate end; then the last state of each cycle is kept.
        """
        burnt = min(round(self.burn_in * total), total - 1)
        if cycle_ends:
            return {end for end in cycle_ends if end > burnt}
        left = total - burnt
        if self.thinning is not None:
            return set(range(total, burnt, -self.thinning))
        return set(range(total, burnt, -max(1, left // self.samples))[: self.samples])


def restart(model: nn.Module, plan: Plan) -> None:
    """Give a network a fresh random start, in place; what is frozen stays as it is."""
    # From the run's generator, so that members differ over ranks and a resumed run repeats them.
    generator = plan.generator
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with forked_random_numbers():
        torch.manual_seed(seed)
        fresh = plan.new_model()
    assign(model, snapshot(fresh, held_names(model)))


class SamplerMethod(Method):
    """A method whose posterior is the states that a sampler went through.

    The first chain of the first process starts from the network as it is given, every other one from a
    fresh random start. A chain that breaks down is left out, with a warning, as long as there are others.

    Args:
        burn_in: Share of the run before the first sample. If None, it is half the run for a sampler with
            given steps, and for one that tunes itself the length of its warm-up.
        samples: Samples to keep, spread evenly over the rest of the run. With a cyclic schedule it is
            the last of each cycle instead.
        thinning: Updates from one sample to the next, in place of `samples`.
        chains: Chains that each process runs one after another, `epochs` epochs each; all but the
            first start anew from random weights. If None, 4 side by side in each process for a network of up
            to 20,000 weights that allows it, trained without `init`; otherwise 1.
        side_by_side: Run the chains of a process together, through `torch.func.vmap`: faster for small
            networks. They then see the same batches.
        sample_folder: Keep the samples as files in this folder instead of in memory.
    """

    one_per_rank = True
    # Reshuffled batches have noise that cancels over an epoch, which thermostats take for heat.
    independent_batches = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        burn_in: float | None = None,
        samples: int = 30,
        thinning: int | None = None,
        chains: int | None = None,
        side_by_side: bool = False,
        sample_folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, likelihood, plan, **options, burn_in=burn_in)
        self.chains, self.sample_folder = 1 if chains is None else chains, sample_folder
        if chains is not None and chains < 1:
            raise ValueError(f"chains is {chains}: expected a whole number of at least 1")
        ends = plan.schedule.cycle_ends(plan.epochs, plan.steps_per_epoch)
        self.total = max(1, plan.epochs * plan.steps_per_epoch)
        self.chain, self.updates, self.dead = 0, 0, False
        self.bank = Samples(model, folder=self._folder(f"rank{plan.rank}"))
        self.stack: StackedChains | None = None
        self._tracer = Tracer(self.total)
        self._losses = torch.zeros(0)
        self._rows = Late()  # numbers of traces
        if plan.rank > 0:
            restart(model, plan)
        if chains is None and self._several():
            _LOG.info(
                "%s runs %d chains side by side, the first from the network's weights, the others from new "
                "random ones; if the network is trained already, init=network starts a single chain from it",
                self.name, self.chains,
            )  # fmt: skip
        elif side_by_side:
            self._stack_chains()
        else:
            self.set_optimizer(self.build(self.algorithm, model))
        if burn_in is None:
            assert isinstance(self.optimizer, Sampler)
            burn_in = self.optimizer.warmup / self.total or 0.5
        self.keep = Collection(burn_in, samples, thinning).updates(self.total, ends)

    def _several(self) -> bool:
        """Stack chains if the network is small and `torch.func.vmap` can run it; return whether it did."""
        size = sum(p.numel() for p in trainable(self.model).values())
        self.chosen = {"chains": 1}
        if size > _SMALL or self.plan.start is not None:
            return False
        own, before, works = snapshot(self.model), generator_state(self.plan.generator), True
        with forked_random_numbers(), warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that an operation is slow under vmap
            try:
                self.chains = _CHAINS
                self._stack_chains()
                self._try_stack()
            except Exception as error:  # of any network
                _LOG.debug("one chain, because several cannot run side by side: %s", error)
                works = False
        if not distributed.any_of([not works])[0]:
            self.chosen = {"chains": _CHAINS, "side_by_side": True}
            return True
        self.chains, self.stack, self.noise = 1, None, LearnedNoise(self.likelihood)
        assign(self.model, own)
        self.plan.generator.set_state(before)
        return False

    def _try_stack(self) -> None:
        """Raise an error if the stacked chains have no gradients on the first batch."""
        assert self.stack is not None
        if self.plan.peek is None:
            raise ValueError("there is no batch to try")
        inputs, targets = split_batch(self.plan.peek())
        if targets is None:
            raise ValueError("there are no targets")
        stacked = list(trainable(self.stack.model).values())
        device = stacked[0].device
        losses = self.stack.losses(
            suited(inputs, device, network_dtype(self.model)), as_labels(targets).to(device),
            noise=self.noise.parameters,
        )  # fmt: skip
        gradients = torch.autograd.grad(losses.sum(), stacked, allow_unused=True)
        if not all(g is None or bool(g.isfinite().all()) for g in gradients):
            raise ValueError("the first gradients are not finite")

    def _stack_chains(self) -> None:
        own = snapshot(self.model)
        starts = [own]
        for _ in range(1, self.chains):
            restart(self.model, self.plan)
            starts.append(snapshot(self.model))
        assign(self.model, own)
        self.stack = StackedChains(self.model, self.likelihood, starts, self.plan.output)
        self.noise = LearnedNoise(self.likelihood)
        self.noise.stack(self.chains)
        one: Sampler = self.build(self.algorithm, self.model)
        temperatures = one.param_groups[0]
        sampler: Sampler = self.build(
            self.algorithm, self.stack.model, prior=StackedPrior.of(one.prior),
            temperature=temperatures["temperature"],
        )  # fmt: skip
        if temperatures["prior_temperature"] < 1:  # by the weights of one chain, not of all
            sampler.cool(temperatures["prior_temperature"])
        self.set_optimizer(sampler)
        if sampler.shares_state:
            raise ValueError(
                "one thermostat cannot serve several chains: leave out side_by_side, or use a thermostat per "
                "parameter"
            )

    @property
    def own_folder(self) -> Path | None:
        """The folder of the samples, if they are kept in one."""
        return None if self.sample_folder is None else Path(self.sample_folder)

    def _folder(self, part: str) -> Path | None:
        if self.sample_folder is None:
            return None
        whole = Path(self.sample_folder)
        return whole if self.plan.world_size == 1 else whole / part

    @property
    def epochs(self) -> int:
        """Epochs of all chains of this process together."""
        return self.plan.epochs * (1 if self.stack is not None else self.chains)

    def begin_epoch(self, epoch: int) -> None:
        """Start the next chain once the previous one has ended."""
        if epoch == 0 and self.updates == 0 and self.bank.folder is not None:
            # Anew: by now it is locked, but another run may have written to it before.
            self.bank = Samples(self.model, folder=self.bank.folder)
        if epoch == 0 and self.updates == 0 and len(self.bank) > 0:
            raise ValueError(
                f"{self.bank.folder} already holds {len(self.bank)} samples and there is no checkpoint of "
                "theirs to resume: choose an empty folder, or remove them"
            )
        if epoch // self.plan.epochs > self.chain:
            self.chain, self.updates, self.dead = self.chain + 1, 0, False
            restart(self.model, self.plan)
            self.noise.restart()
            self.set_optimizer(self.build(self.algorithm, self.model))

    def loss(self, inputs: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch; every chain gets its own gradient."""
        if self.stack is None:
            return super().loss(inputs, targets, weights)
        self._losses = self.stack.losses(inputs, targets, weights, self.noise.parameters)
        if self._losses.device.type != "cpu":
            return self._masked(self._losses)
        fine = self._losses[self.stack.alive & torch.isfinite(self._losses.detach())]
        mean = fine.detach().mean()
        if len(fine) == 0:  # where it broke down is looked for in the network
            assign(self.model, self.stack.weights(0))
        self.logs = {"nll": mean}
        # Its value is the mean over chains, its gradient that of the sum.
        return fine.sum() - fine.detach().sum() + mean

    def _masked(self, losses: Tensor) -> Tensor:
        """Return the loss of the chains that are left, without a look at which they are."""
        assert self.stack is not None
        alive = self.stack.alive & torch.isfinite(losses.detach())
        fine = torch.where(alive, losses, 0)
        mean = fine.detach().sum() / alive.sum()
        self.logs = {"nll": mean}
        return fine.sum() - fine.detach().sum() + mean

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take one step, and a snapshot if it is one to keep."""
        sampler = self.optimizer
        assert isinstance(sampler, Sampler)
        traced = self._tracer.wants(self.updates + 1) and not self.dead
        if traced:
            self._tracer.before(sampler)
        try:
            if self.dead:
                return self._nothing()
            loss = super().step(self._guarded(closure))
            self._read_rows()
            if traced:
                self._trace(sampler, loss)
            if self.stack is not None and loss.device.type != "cpu":
                # Where it breaks down is looked for in the network, after it has gone on.
                assign(self.model, self.stack.weights(0))
            return loss
        except (TrainingError, FloatingPointError) as error:
            if not self._gives_up(error):
                raise
            return self._nothing()
        finally:
            # An update that was skipped because float16 overflowed counts too.
            self.updates += 1
            if self.updates in self.keep and not self.dead:
                self._collect()

    def _nothing(self) -> Tensor:
        """Return the loss of a chain that has been left out."""
        return next(self.model.parameters()).new_full((), math.nan, requires_grad=False)

    def look(self) -> None:
        """Look at the last step's gradients and traces; a chain that has broken down is left out."""
        try:
            super().look()
            if self.stack is not None:
                self._bury(self.stack.look())
        except FloatingPointError as error:
            if not self._gives_up(error):
                raise
        self._read_rows()

    def _gives_up(self, error: Exception) -> bool:
        """Leave out the present chain, which has broken down; return whether there are others."""
        if self.chains * self.plan.world_size == 1 or self.stack is not None:
            return False
        self._discard_chain(self.chain, str(error))
        last = self.chain == self.chains - 1
        if last and self.plan.world_size == 1 and len(self.bank) == 0:
            return False
        self.dead = True
        restart(self.model, self.plan)  # finite weights, for the checkpoint
        self.noise.restart()
        return True

    def _guarded(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stack = self.stack
        if stack is None:
            return closure

        def guarded() -> Tensor:
            loss = closure()
            self._bury(stack.check_gradients())
            return loss

        return guarded

    def _bury(self, died: list[int]) -> None:
        """Leave out stacked chains; raise a `FloatingPointError` if none is left."""
        assert self.stack is not None
        for chain in died:
            self._discard_chain(chain, "its gradient is not finite")
        if not self.stack.left:
            late = self.stack.alive.device.type != "cpu"
            raise (LateError if late else FloatingPointError)(
                "no chain is left whose gradient is finite"
            )

    def _number(self, chain: int) -> int:
        """Return the chain's number among those of all processes."""
        return self.plan.rank * self.chains + chain

    def _collect(self) -> None:
        if self.stack is None:
            self.bank.append(chain=self._number(self.chain))
            return
        for chain in self.stack.left:
            self.bank.append(self.stack.weights(chain), chain=self._number(chain))

    def _trace(self, sampler: Sampler, loss: Tensor) -> None:
        """Note what the chains look like, or ask an accelerator for it."""
        chains = [None] if self.stack is None else self.stack.left
        numbers: list[Tensor] = []
        rows = []
        for chain in chains:
            own, finished = self._tracer.row(
                sampler, loss if chain is None else self._losses[chain], update=self.updates + 1,
                chain=self._number(self.chain if chain is None else chain), stacked=chain,
            )  # fmt: skip
            rows.append((chain, len(own), finished))
            numbers += own
        self._rows.exchange({str(i): number for i, number in enumerate(numbers)}, rows)
        if loss.device.type == "cpu":
            self._read_rows()

    def _read_rows(self) -> None:
        """Take in the traces that have been asked for, except those of chains that had died."""
        numbers, rows = self._rows.rest() or ({}, [])
        values = iter(numbers.values())
        for chain, count, finished in rows:
            own = [next(values) for _ in range(count)]
            if chain is None or self.stack is None or chain in self.stack.left:
                self.traces.append(finished(own))

    def _discard_chain(self, chain: int, why: str) -> None:
        """Leave out a chain that has broken down: its earlier samples are not to be trusted."""
        number = self._number(chain)
        dropped = self.bank.drop_chain(number)
        _LOG.warning(
            "chain %d broke down after %d updates; it is left out with its %d samples, others continue: %s",
            number, self.updates, dropped, why,
        )  # fmt: skip

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Keep a finished chain's noise level; of stacked chains, score the first after the epoch."""
        alive = [] if self.stack is None else self.stack.left
        if (epoch + 1) % self.plan.epochs == 0 and not self.dead:
            self.noise.keep(alive)
        if self.stack is None:
            self.noted["chain"] = self._number(self.chain)
        else:
            assign(self.model, self.stack.weights(alive[0]))
            self.noise.show(alive[0])

    @property
    def finished(self) -> bool:
        """Whether all chains of this process have ended."""
        last = 0 if self.stack is not None else self.chains - 1
        return self.chain == last and self.updates >= self.total

    def posterior(self) -> Samples:
        """Return the snapshots of all chains, of all processes at the end; the current weights if none."""
        if self.finished:
            self.bank.tidy()
        if self.plan.world_size > 1 and self.finished:
            return self._pooled()
        if len(self.bank) > 0:
            return self.bank
        if self.finished:
            raise ValueError(_NOTHING)
        present = Samples(self.model)
        present.append()
        return present

    def pooled(self, states: list[dict[str, Any]]) -> Samples:
        """Return the snapshots of all chains; on disk, in a folder that the first process writes."""
        on_disk = self.sample_folder is not None
        whole = None if not on_disk else self._folder("pooled")
        if on_disk and (len(states) == 1 or distributed.rank() > 0):
            return Samples(self.model, folder=whole)
        pooled = Samples(self.model, folder=whole)
        pooled.truncate(0)
        for part, state in enumerate(states):
            kept: Iterable[Weights] = state["samples"]
            if on_disk:
                bank = Samples(self.model, folder=self._folder(f"rank{part}"))
                bank.restore(state["samples"])
                bank.tidy()
                kept = bank
            for weights, chain in zip(kept, state["chains"], strict=True):
                pooled.append(weights, chain=chain)
        if len(pooled) == 0:
            raise ValueError(_NOTHING)
        pooled.tidy()
        return pooled

    def _pooled(self) -> Samples:
        """Return the snapshots of all processes; on disk, in a folder that the first process writes."""
        distributed.barrier()  # one process may take longer
        on_disk = self.bank.folder is not None
        pooled = Samples(self.model, folder=self._folder("pooled") if self.plan.rank == 0 else None)
        pooled.truncate(0)
        counts = distributed.gather(torch.tensor(float(len(self.bank))))
        chains = self.bank.chains
        if not sum(map(float, counts)):
            raise ValueError(_NOTHING)
        for rank, count in enumerate(counts):
            for index in range(int(count)):
                mine = rank == self.plan.rank
                weights: Weights = self.bank[index] if mine else self.bank.current()
                number = torch.tensor(float(chains[index] if mine else 0))
                distributed.broadcast([number, *weights.values()], rank)
                if not on_disk or self.plan.rank == 0:
                    pooled.append(weights, chain=int(number))
        pooled.tidy()
        return pooled if len(pooled) > 0 else self.bank

    def state_dict(self) -> dict[str, Any]:
        """Return the chain and the snapshots so far, or the list of them if they are on disk."""
        kept = self.bank.contents() if self.bank.folder is not None else list(self.bank)
        state = super().state_dict() | {
            "chain": self.chain,
            "updates": self.updates,
            "dead": self.dead,
            "samples": kept,
            "chains": self.bank.chains,
            "traces": self.traces,
        }
        if self.stack is not None:
            state["stack"] = self.stack.model.state_dict()
            state["alive"] = self.stack.alive
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the same chain; snapshots that were written to disk later are dropped."""
        super().load_state_dict(state)
        self.chain, self.updates, self.dead = state["chain"], state["updates"], state["dead"]
        self.traces = list(state["traces"])
        if self.stack is not None:
            self.stack.model.load_state_dict(state["stack"])
            self.stack.revive(state["alive"])
        self._rows = Late()
        if self.bank.folder is not None:
            self.bank.restore(state["samples"])
            return
        self.bank.truncate(0)
        for weights, chain in zip(state["samples"], state["chains"], strict=True):
            self.bank.append(weights, chain=chain)
