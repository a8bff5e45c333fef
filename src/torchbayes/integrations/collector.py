"""What becomes the posterior while somebody else's loop trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchbayes.average.averager import Averager
from torchbayes.integrations.optimizers import own_optimizer
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Posterior, Samples
from torchbayes.train.chains import Collection

__all__ = ["Collector"]


class Collector:
    """Takes a chain's samples or an average's snapshots after the updates of any training loop.

    Its state goes into the loop's checkpoints: `accelerator.register_for_checkpointing(collector)`, and the
    callbacks for Lightning and Hugging Face save theirs. A resumed run then ends with the same posterior.

    Args:
        source: Where the posterior comes from. The weights of a sampler, such as `tb.SGLD`, are kept as
            samples. An averager, such as `tb.SWAG`, takes a snapshot after every epoch. Anything else with a
            `posterior()`, such as `tb.IVON` or `tb.MeanField`, knows it by itself.
        updates: Number of updates of the whole run; needed for a sampler or an averager.
        burn_in: Share of the run before the first sample or snapshot.
        samples: Samples to keep of a chain, spread evenly over the rest of the run.
        thinning: Updates from one sample to the next, in place of `samples`; for an averager, from one
            snapshot to the next, in place of epochs.
        folder: Keep the samples as files in this folder instead of in memory and in checkpoints.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.integrations import Collector
        >>> model = torch.nn.Linear(2, 1)
        >>> sampler = tb.SGLD(model, train_size=10)
        >>> collector = Collector(sampler, updates=20, burn_in=0.5, thinning=2)
        >>> for _ in range(20):
        ...     sampler.zero_grad()
        ...     model(torch.ones(10, 2)).square().mean().backward()
        ...     sampler.step()
        ...     collector.after_update()
        >>> collector.posterior()
        Samples(5 snapshots of Linear, in memory)
    """

    def __init__(
        self, source: Any, *, updates: float | None = None, burn_in: float = 0.5, samples: int = 30,
        thinning: int | None = None, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        source = own_optimizer(source)
        if not isinstance(source, Sampler) and not callable(getattr(source, "posterior", None)):
            raise TypeError(
                f"{type(source).__name__} has no posterior: pass an optimiser of torchbayes, an averager "
                "such as tb.SWAG(model) or a wrapper such as tb.MeanField(model)"
            )
        self.source = source
        self._plan = Collection(burn_in, samples, thinning)
        self._bank = Samples(source.model, folder=folder) if isinstance(source, Sampler) else None
        self._done = 0
        self._keep: set[int] = set()
        self._burnt = 0
        if self._bank is not None or isinstance(source, Averager):
            self._schedule(updates)

    def _schedule(self, updates: float | None) -> None:
        if updates is None or not math.isfinite(updates) or updates < 1:
            raise ValueError(
                f"the run's number of updates is {updates}, and burn_in is a share of it: give the trainer a "
                "number of epochs or steps"
            )
        total = int(updates)
        self._burnt = min(round(self._plan.burn_in * total), total - 1)
        if self._bank is not None or self._plan.thinning is not None:
            self._keep = self._plan.updates(total)

    def after_update(self, *, epoch_ended: bool = False) -> None:
        """Count an update, and keep the weights if it is one to keep.

        Args:
            epoch_ended: Whether it was the last one of an epoch.
        """
        self._done += 1
        kept = self._done in self._keep
        if self._bank is not None and kept:
            self._bank.append()
        elif isinstance(self.source, Averager):
            by_epoch = self._plan.thinning is None and epoch_ended and self._done > self._burnt
            if kept or by_epoch:
                self.source.update()

    def finish(self, batches: Iterable[Any]) -> None:
        """Give an average batch-norm statistics of its own, which takes a pass over the training data."""
        if isinstance(self.source, Averager) and len(self.source):
            self.source.recalibrate(batches)

    def posterior(self) -> Posterior:
        """Return the posterior as it is by now.

        Raises:
            ValueError: If there is no sample or snapshot yet.
        """
        if self._bank is None:
            result: Posterior = self.source.posterior()
            return result
        if len(self._bank) == 0:
            raise ValueError(
                f"there is no sample after {self._done} updates: train for longer, or use a smaller burn_in"
            )
        return self._bank

    def state_dict(self) -> dict[str, Any]:
        """Return the samples or the average so far; samples that are in a folder are listed only."""
        state: dict[str, Any] = {"updates": self._done}
        if isinstance(self.source, Averager):
            state["averager"] = self.source.state_dict()
        if self._bank is not None:
            on_disk = self._bank.folder is not None
            state["samples"] = self._bank.contents() if on_disk else list(self._bank)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; samples that were written to a folder later are dropped.

        Raises:
            ValueError: If it is the state of another kind of posterior.
        """
        self._check(state)
        self._done = state["updates"]
        if isinstance(self.source, Averager):
            self.source.load_state_dict(state["averager"])
        elif self._bank is not None and self._bank.folder is not None:
            self._bank.restore(state["samples"])
        elif self._bank is not None:
            self._bank.truncate(0)
            for weights in state["samples"]:
                self._bank.append(weights)

    def _check(self, state: dict[str, Any]) -> None:
        kept = state.get("samples")
        here = (isinstance(self.source, Averager), self._bank is not None)
        if here != ("averager" in state, kept is not None):
            raise ValueError(
                f"the checkpoint is of another method than {type(self.source).__name__}: resume with the one "
                "that it was made with"
            )
        if self._bank is not None and (self._bank.folder is None) != isinstance(kept, list):
            raise ValueError(
                "the checkpoint's samples are "
                + ("in memory" if isinstance(kept, list) else "in a folder")
                + " and these are not: resume with the same folder="
            )

    def start_afresh(self) -> None:
        """Refuse to add the samples of a new run to those that a folder already has."""
        if self._bank is not None and self._done == 0 and len(self._bank) > 0:
            raise ValueError(
                f"{self._bank.folder} already holds {len(self._bank)} samples and nothing is resumed: choose "
                "an empty folder, or remove them"
            )
