"""The loop: epochs, batches, one update each, a line of history, now and then a checkpoint.

What differs between methods is inside `Method.loss` and `Method.step`.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.core.batch import (
    as_labels,
    batch_weights,
    call,
    map_tensors,
    network_dtype,
    sent,
    slice_batch,
    split_batch,
    suited,
)
from torchbayes.core.device import device_random_state, generator_state, set_device_random_state
from torchbayes.core.errors import PosteriorFileError
from torchbayes.core.late import Late, LateError
from torchbayes.core.locks import folder_lock
from torchbayes.core.outputs import output_tensor
from torchbayes.core.reduction import Reduction, average_gradients, sent_early
from torchbayes.data.order import EpochLoader
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.posterior import Posterior
from torchbayes.train.data import device_of
from torchbayes.train.failures import (
    SkippedStep,
    TrainingError,
    first_nonfinite_layer,
    first_nonfinite_weight,
)
from torchbayes.train.guard import CHECKED, RETRIES, SLOWER, Guard, Kept, copied, largest_weight
from torchbayes.train.interrupt import StopRequest, stop_requests
from torchbayes.train.method import Method
from torchbayes.train.progress import Progress
from torchbayes.train.run_folder import RunError, RunFolder
from torchbayes.train.schedule import Schedule
from torchbayes.train.throughput import arranged
from torchbayes.train.tracking import Logger

__all__ = ["Training"]


class _Taken(NamedTuple):
    """An update that has been taken: its number, its inputs, and the weights before it, to find a failure."""

    epoch: int
    batch: int
    inputs: Any
    weights: list[tuple[Tensor, Tensor]]


# What settings were before they existed; see `RunFolder.check_config`.
_BEFORE: dict[str, Any] = {
    **Schedule().settings(), "clip_norm": None, "amp": None, "accumulate": 1, "options": {},
    "memory_format": None, "compile": None,
    "output": None, "params": None, "init_checksum": None, "reset_weights": None,
}  # fmt: skip


@dataclass
class Training:
    """The state of a run, and the loop."""

    method: Method
    loader: EpochLoader
    validation: EpochLoader | None
    clip_norm: float | None
    amp: torch.dtype | None
    accumulate: int
    checkpoint_seconds: float
    memory_format: str | None = None
    resting: list[nn.Module] = field(default_factory=list)
    idle: bool = False
    logger: Logger | None = None
    folder: RunFolder | None = None
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    guard: Guard = field(default_factory=Guard)
    seen: list[tuple[Any, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device, self.dtype = device_of(self.method.model), network_dtype(self.method.model)
        self.shared = distributed.world_size() > 1 and not self.method.one_per_rank
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self._reduction: Reduction[int] = Reduction()
        self._saved_at = time.monotonic()
        self._fresh = False
        self._kept: Kept | None = None
        # An accelerator's numbers are read one update late: see `torchbayes.core.late`.
        self._late = None if self.device.type == "cpu" else Late()
        self._total: Tensor | None = None
        self._before: _Taken | None = (
            None  # the last update, of which an optimiser may have to tell yet
        )

    @contextmanager
    def opened(
        self,
        path: str | Path | None,
        settings: dict[str, Any],
        resume: bool,
        config: dict[str, Any] | None = None,
    ) -> Iterator[None]:
        """Begin a run folder, or continue the run that is in it; others are kept out meanwhile.

        Args:
            path: The folder; with None nothing is written.
            settings: What config.toml holds.
            resume: Whether to continue.
            config: Those of the settings that are the caller's, who knows what they were before they existed.
        """
        if path is None:
            with self._locked():
                yield
            return
        own_files = self.method.one_per_rank or distributed.rank() == 0
        folder = RunFolder(path, distributed.rank() if self.method.one_per_rank else 0)
        with self._locked(folder):
            if self.idle:
                for _ in range(3):  # as below
                    distributed.barrier()
                self.folder = folder
                yield
                return
            if own_files:
                folder.checkpoint.settle()
            distributed.barrier()
            state = folder.checkpoint.read()
            started = folder.config_file.exists()
            folder.check_not_lost()
            distributed.barrier()
            if started and not resume and (state is not None or folder.posterior_file.exists()):
                raise RunError(
                    f"{path} already holds a run: resume it with resume=True or choose another folder"
                )
            if started and resume and state is None and folder.posterior_file.exists():
                raise RunError(
                    f"{path} holds a finished run but no checkpoint to continue from: load it with load_run, "
                    "or delete its posterior.safetensors to train it again"
                )
            if started and resume:
                folder.check_config(settings, {**settings, **_BEFORE, **(config or {})})
                if distributed.rank() == 0:
                    folder.note_version()
            elif distributed.rank() == 0:
                folder.write_config(settings)
            distributed.barrier()  # all find it when they save
            self.folder, self._fresh = folder, state is None or not resume
            if not self._fresh:
                assert state is not None
                self._restore(state)
                if self.loader.doubt is not None:
                    warnings.warn(
                        "the resumed run may differ from one that was never stopped: "
                        f"{self.loader.doubt}",
                        stacklevel=4,
                    )
            elif own_files:
                folder.keep_metrics([])  # a kill before the first checkpoint may have left some
            yield

    @contextmanager
    def _locked(self, folder: RunFolder | None = None) -> Iterator[None]:
        """Lock the folders of run and method in the first process; if one is in use, all of them end."""
        own = self.method.own_folder
        if own is not None and folder is not None and own.resolve() == folder.path.resolve():
            own = None
        with ExitStack() as held:
            refused: RunError | None = None
            if distributed.rank() == 0:
                try:
                    if folder is not None:
                        held.enter_context(folder.locked())
                    if own is not None:
                        held.enter_context(folder_lock(own))
                except RunError as error:
                    refused = error
            if distributed.world_size() > 1 and distributed.any_of([refused is not None])[0]:
                place = own if folder is None else folder.path
                refused = refused or RunError(f"{place} cannot be used: see the first process")
            if refused is not None:
                raise refused
            yield

    def run(self, progress: Progress) -> None:
        """Train to the end."""
        if self.idle:
            return
        method, steps = self.method, len(self.loader)
        epochs = method.epochs
        progress.start(method.name, epochs * steps, self.epoch * steps + self.batch)
        with progress, stop_requests() as stop:
            while self.epoch < epochs:
                started = time.monotonic()
                self._keep()
                method.begin_epoch(self.epoch)
                method.module.train()
                for norm in self.resting:
                    norm.eval()
                if self._fresh:
                    # A disk that is full, or a state that no file can hold, is better known at once; and a
                    # kill before the second checkpoint finds what it needs to continue.
                    self._fresh = False
                    self._save()
                back = False
                for batch in method.batches(self.loader, self.epoch, self.batch):
                    try:
                        self._update(*split_batch(batch), batch_weights(batch))
                    except TrainingError as error:
                        self._go_back(error)
                        back = True
                        break
                    self.batch += 1
                    progress.advance(self._average())
                    save, end = self._pause(stop)
                    if save:
                        try:
                            self._count_rest()  # what is saved is known to be sound
                        except TrainingError as error:
                            self._go_back(error)
                            back = True
                            break
                        now = time.monotonic()
                        self.seconds, started = self.seconds + now - started, now
                        self._save()
                    if end:
                        self._stopped(stop.signal)
                if not back:
                    try:
                        self._count_rest()
                    except TrainingError as error:
                        self._go_back(error)
                        back = True
                if back:
                    progress.start(method.name, epochs * steps, self.epoch * steps)
                    continue
                method.end_epoch(self.epoch, self._training_batches())
                self.seconds += time.monotonic() - started
                self._log_epoch()
                self.epoch, self.batch, self.sums = self.epoch + 1, 0, {}
                if self._pause(stop)[0] or self.epoch == epochs:
                    self._save()
            if self.alike and not distributed.stands_in() and method.noise.pool():
                self._save()

    @property
    def alike(self) -> bool:
        """Whether there are as many processes now as have begun the run."""
        return self.method.plan.world_size == distributed.world_size()

    def pooled(self) -> Posterior:
        """Return the posterior of all that the processes which began the run have trained.

        Where there are more of them now or fewer, what each of them, or the one that stood in for it, has
        reached is read from its checkpoint.
        """
        if self.alike:
            return self.method.posterior()
        assert self.folder is not None
        distributed.barrier()  # all are done
        path, count = self.folder.path, self.method.plan.world_size
        read = [RunFolder(path, part).checkpoint.read() for part in range(count)]
        states = [{} if state is None else state for state in read]
        ends = [values for state in states if state for values in state["noise"]["ends"]]
        changed = self.method.noise.pool(ends)
        posterior: Posterior | None = None
        for turn in (True, False):  # what is on disk the first process writes
            if (distributed.rank() == 0) is turn:
                posterior = self.method.pooled([state.get("method", {}) for state in states])
            distributed.barrier()
        if changed and distributed.rank() == 0:
            self._save()
        assert posterior is not None
        return posterior

    def _wants_more(self, targets: Tensor) -> bool:
        """Whether to keep a batch for the check of the posterior: one alone may be of a few examples."""
        if not self.seen:
            return True
        kept = [batch for _, batch in self.seen]
        alike = self.loader.splits and targets.shape[1:] == kept[0].shape[1:]
        return alike and sum(map(len, kept)) < CHECKED

    def _update(self, inputs: Any, targets: Tensor | None, weights: Tensor | None) -> None:
        """Take one step on one batch."""
        if targets is None:
            raise ValueError("the training set has no targets: give pairs of inputs and targets")
        inputs = self._arranged(inputs)
        targets = sent(as_labels(targets), self.device)
        weights = None if weights is None else sent(weights, self.device)
        count = len(targets)
        if count and weights is None and self._wants_more(targets):
            self.seen.append((inputs, targets))
        # Batches are global: under torchrun this process has only its share of the examples.
        share = self._share(count)
        size = math.ceil(count / self.accumulate) if count else 1
        starts = range(0, count, size)
        taken = _Taken(self.epoch, self.batch, inputs, self._weights_now())
        self._total = None

        def closure() -> Tensor:
            self.method.optimizer.zero_grad()
            if self.method.noise.parameters:
                self.method.noise.zero_grad()
            total = torch.zeros((), device=self.device)
            parts: dict[str, Tensor] = {}
            for start in starts:
                piece = inputs if len(starts) == 1 else slice_batch(inputs, start, start + size)
                wanted = targets if len(starts) == 1 else targets[start : start + size]
                given = () if weights is None else (weights[start : start + size],)
                weight = len(wanted) / count
                with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
                    loss = self.method.loss(piece, wanted, *given) * weight
                with self._sending(share, last=start == starts[-1]):
                    self.scaler.scale(loss).backward()
                total += loss.detach()
                for name, value in self.method.logs.items():
                    parts[name] = parts.get(name, 0.0) + value * weight
            self._finish_gradients(share)
            self.parts = parts
            if self._late is None:
                self._check_loss(float(total), taken)
            else:
                self._total = total if self._total is None else self._total + total
            return total

        try:
            loss = self.method.step(closure)
        except SkippedStep:
            return
        except FloatingPointError as error:  # an optimiser that met a non-finite gradient
            self._count_rest()
            if isinstance(error, LateError):
                raise self._failure(str(error), self._before) from error
            if self._total is not None:
                self._check_loss(float(self._total), taken)
            raise self._failure(str(error)) from error
        except ValueError as error:
            if self._total is not None:  # the optimiser has looked at the update before
                self._before = taken
            self._count_rest()
            bad = first_nonfinite_weight(self.method.module)
            if bad is not None:
                raise self._failure(f"weight {bad!r} is not finite") from error
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"batch norm cannot be trained on one example, but batch {self.batch + 1} of epoch "
                f"{self.epoch + 1}, or a piece of it, has no more: let the loader drop it (drop_last=True), "
                "or set accumulate to 1"
            ) from error
        self._before = None if self._late is None else taken
        if self.method.noise.parameters:
            self.method.noise.step()
        numbers: dict[str, Any] = {"loss": loss, **self.parts}
        if self._late is None:
            self._count({name: float(value) for name, value in numbers.items()}, taken)
        else:
            total: dict[str, Any] = {} if self._total is None else {"": self._total}
            before = self._late.exchange(total | numbers, taken)
            if before is not None:
                self._count(*before)

    def _count(self, numbers: dict[str, float], taken: _Taken) -> None:
        """Add the numbers of an update to the epoch's; raise a `TrainingError` if it has failed."""
        total = numbers.pop("", 0.0)
        if not self.method.dead:
            self._check_loss(total, taken)
        worst = numbers.pop("worst", numbers.get("nll", numbers["loss"]))
        for name, value in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if self.guard.add(worst):
            where = largest_weight(self.method.moving)
            raise self._failure(
                f"the loss has grown from {self.guard.start:.3g} to {self.guard.recent[-1]:.3g}, and weight "
                f"{where!r} has the largest entries",
                taken,
            )

    def _count_rest(self) -> None:
        """Count the last update, if its numbers have not been read, and look at what it has left."""
        rest = None if self._late is None else self._late.rest()
        found: FloatingPointError | None = None
        try:
            self.method.look()
        except FloatingPointError as error:
            found = error
        if rest is not None:
            self._count(*rest)
        if found is not None:
            raise self._failure(str(found), self._before) from found

    def _average(self) -> float:
        """Return the average loss of the epoch's updates, as far as it has been read."""
        read = self.batch - (self._late is not None and self._late.waiting)
        return self.sums["loss"] / read if read and "loss" in self.sums else math.nan

    def _check_loss(self, loss: float, taken: _Taken) -> None:
        """Raise a `TrainingError` that names the layer if the loss of an update is not finite."""
        if math.isfinite(loss):
            return
        for tensor, before in taken.weights:
            tensor.detach().copy_(before)
        where = first_nonfinite_layer(self.method.suspect(), taken.inputs)
        raise self._failure(f"the loss is not finite, {where}", taken)

    def _weights_now(self) -> list[tuple[Tensor, Tensor]]:
        """Copy the weights, unless they are too many, if a failure would be noticed after the update."""
        module = self.method.moving
        if self._late is None or not Kept.small(module):
            return []
        return [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]

    def _arranged(self, inputs: Any) -> Any:
        # Only between devices: a conversion on the CPU is that of `suited`.
        inputs = map_tensors(inputs, lambda tensor: sent(tensor, self.device))
        return arranged(suited(inputs, self.device, self.dtype), self.memory_format)

    def _keep(self) -> None:
        """Keep a copy of the training at the beginning of some epochs, to go back to."""
        if self.batch or not Kept.wanted(self.epoch) or not self.guard.good:
            return
        # Processes that share batches would have to agree on what is a breakdown.
        if self.shared or not Kept.small(self.method.moving):
            return
        state = {
            "method": self.method.state_dict(),
            "likelihood": self.method.likelihood.state_dict(),
            "noise": self.method.noise.state_dict(),
        }
        self._kept = Kept(state, self.epoch, self.guard.tries)

    def _go_back(self, error: TrainingError) -> None:
        """Continue from the last good state with shorter steps, a few times; otherwise raise the error."""
        kept = self._kept
        if kept is None or self.guard.tries >= RETRIES or "inputs have" in error.layer:
            raise error
        begun = (self.epoch, self.batch) == (kept.epoch, 0)
        if self._late is not None:
            begun = error.step == kept.epoch * len(self.loader)
        if begun:  # no step has been taken that could be shorter
            raise error
        self.guard.tries += 1
        if self._late is not None:
            self._late.rest()
        state = copied(kept.state)
        self.method.load_state_dict(state["method"])
        self.method.likelihood.load_state_dict(state["likelihood"])
        self.method.noise.load_state_dict(state["noise"])
        self.method.slow_down(SLOWER ** (self.guard.tries - kept.tries))
        self.guard.recent.clear()
        self.epoch, self.batch, self.sums = kept.epoch, 0, {}
        del self.history[kept.epoch :]
        if self.folder is not None and (self.method.one_per_rank or distributed.rank() == 0):
            self.folder.keep_metrics(self.history)
        warnings.warn(
            f"{str(error).partition(';')[0]}: training goes back to the beginning of epoch {kept.epoch + 1} "
            f"with a learning rate {SLOWER:g} times as large (try {self.guard.tries} of {RETRIES})",
            stacklevel=4,
        )

    def _share(self, count: int) -> float:
        if not self.shared:
            return 1.0
        return self.loader.weight(self.batch, count)

    def _finish_gradients(self, share: float) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.method.optimizer)
            before = self.scaler.get_scale()
            self.scaler.update()
            overflowed = self.scaler.get_scale() < before
            if self.shared and distributed.any_of([overflowed])[0]:
                # A step that one process skips, all must skip.
                overflowed = True
                self.scaler.update(before * self.scaler.get_backoff_factor())
            if overflowed:
                # The gradient overflowed in float16; methods restore their weights on any exception.
                self.sums.setdefault("loss", 0.0)
                raise SkippedStep
        parameters = [p for group in self.method.optimizer.param_groups for p in group["params"]]
        if self.shared:
            averaged = self._averaged()
            apart = self.method.reduces_gradients
            average_gradients(self._reduction, averaged, share, apart=apart)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def _averaged(self) -> list[Tensor]:
        """Return the parameters whose gradients are averaged over processes."""
        # The noise has its own Adam, whatever the method does with the network's gradients.
        noise: list[Tensor] = list(self.method.noise.parameters.values())
        if not self.method.reduces_gradients:
            return noise
        return [
            *(p for group in self.method.optimizer.param_groups for p in group["params"]),
            *noise,
        ]

    def _sending(self, share: float, *, last: bool) -> AbstractContextManager[None]:
        """Return a context in which the last backward pass sends what the update needs of its gradients."""
        # A scaler unscales gradients after the pass, in a way that does not show.
        if not (self.shared and last) or self.scaler.is_enabled():
            return nullcontext()
        if self.method.reduces_gradients:
            return sent_early(self._reduction, self._averaged(), share)
        # They are clipped before the optimiser sums up.
        if self.clip_norm is not None or not isinstance(self.method.optimizer, WeightOptimizer):
            return nullcontext()
        return self.method.optimizer.sent_early()

    def _failure(self, where: str, taken: _Taken | None = None) -> TrainingError:
        epoch, batch = (self.epoch, self.batch) if taken is None else taken[:2]
        step = epoch * len(self.loader) + batch
        kept = (
            ""
            if self.folder is None
            else f"; the last good checkpoint is kept in {self.folder.path}"
        )
        return TrainingError(
            f"training broke down at step {step} (epoch {epoch + 1}): {where}; try a smaller lr, "
            f"clip_norm, or look for non-finite values in the data{kept}",
            step=step,
            layer=where,
        )

    def _log_epoch(self) -> None:
        row: dict[str, Any] = {"epoch": self.epoch + 1}
        row |= {name: total / max(1, self.batch) for name, total in self.sums.items()}
        row |= self.method.noted
        row["lr"] = self.method.optimizer.param_groups[0]["lr"]
        row["seconds"] = round(self.seconds, 3)
        if self.validation is not None:
            row |= self._validate()
        self.history.append(row)
        if self.folder is not None and (self.method.one_per_rank or distributed.rank() == 0):
            self.folder.append_metrics(row)
        if self.logger is not None and distributed.rank() == 0:
            values = {name: value for name, value in row.items() if name != "epoch"}
            self.logger.metrics((self.epoch + 1) * len(self.loader), values)

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Score the current mean weights; `torchbayes evaluate` scores the posterior."""
        assert self.validation is not None
        module, likelihood = self.method.scored(self._training_batches()), self.method.likelihood
        nll, count = 0.0, 0
        correct: list[Tensor] = []
        for batch in self.validation.batches(0):
            inputs, targets = split_batch(batch)
            if targets is None:
                raise ValueError("the validation set has no targets: give inputs and targets")
            outputs = call(module, self._arranged(inputs))
            outputs = output_tensor(outputs, self.method.plan.output)
            targets = as_labels(targets).to(self.device)
            size = likelihood.count(targets)
            nll += float(likelihood.loss(outputs, targets)) * size
            right = likelihood.correct(outputs, targets)
            if right is not None:
                correct.append(right.flatten())
            count += size
        scores = {"validation_nll": nll / max(1, count)}
        if correct:
            scores["validation_accuracy"] = float(torch.cat(correct).double().mean())
        return scores

    def _training_batches(self) -> Iterator[Any]:
        for batch in self.loader.batches(self.epoch):
            inputs, targets = split_batch(batch)
            assert targets is not None  # fit has checked it
            pair = self._arranged(inputs), as_labels(targets).to(self.device)
            weights = batch_weights(batch)
            yield pair if weights is None else (*pair, weights.to(self.device))

    def _pause(self, stop: StopRequest) -> tuple[bool, bool]:
        """Whether to save now, and whether to stop afterwards.

        Processes that share batches must agree: one that stops alone would leave the others waiting. A
        signal that arrives while they exchange their requests counts at the next update.
        """
        wanted = stop.requested
        due = self.folder is not None and (
            time.monotonic() - self._saved_at >= self.checkpoint_seconds
        )
        if self.shared:
            wanted, due = distributed.any_of([wanted, due])
        return wanted or due, wanted

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        self._count_rest()
        bad = first_nonfinite_weight(self.method.moving)
        if bad is not None:
            step = self.epoch * len(self.loader) + self.batch
            raise TrainingError(
                f"weight {bad!r} is not finite after step {step}: try a smaller lr or clip_norm; the last "
                "good checkpoint is kept",
                step=step,
                layer=bad,
            )
        if self.folder is None:
            return
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "history": self.history,
            "sums": self.sums,
            "seconds": self.seconds,
            "method": self.method.state_dict(),
            "likelihood": self.method.likelihood.state_dict(),
            "noise": self.method.noise.state_dict(),
            "scaler": self.scaler.state_dict(),
            "guard": self.guard.state_dict(),
            "random": self._random_states(),
            "memory_format": self.memory_format,
        }
        if self.method.one_per_rank or distributed.rank() == 0:
            self.folder.write_checkpoint(state)
            self.folder.write_traces(self.method.traces)
        if self.shared:
            distributed.barrier()

    def _random_states(self) -> list[dict[str, Any]]:
        """Return the random states of this process, or of all that share the checkpoint."""
        own = {
            "torch": generator_state(torch.default_generator),
            "method": generator_state(self.method.plan.generator),
        }
        if self.device.type != "cpu":
            own["device"] = device_random_state(self.device)
        if not self.shared:
            return [own]
        both = {name: distributed.gather(state) for name, state in own.items()}
        return [dict(zip(both, states, strict=True)) for states in zip(*both.values(), strict=True)]

    def _restore(self, state: dict[str, Any]) -> None:
        assert self.folder is not None
        states, place = state["random"], distributed.rank() if self.shared else 0
        try:
            self.method.load_state_dict(state["method"])
            self.method.likelihood.load_state_dict(state["likelihood"])
            self.method.noise.load_state_dict(state["noise"])
            self.scaler.load_state_dict(state["scaler"])
            self.memory_format = state.get("memory_format", self.memory_format)
            if "guard" in state:  # a checkpoint of an earlier version has none
                self.guard.load_state_dict(state["guard"])
            # With more processes than before, the new ones keep their fresh seeds.
            if place < len(states):
                torch.set_rng_state(states[place]["torch"])
                self.method.plan.generator.set_state(states[place]["method"])
                if "device" in states[place]:
                    set_device_random_state(self.device, states[place]["device"])
        except PosteriorFileError:
            raise
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                f"the checkpoint in {self.folder.path} is of another model "
                f"({(str(error) or type(error).__name__).splitlines()[0]}): resume it with the model it was "
                "made with"
            ) from error
        self.epoch, self.batch, self.seconds = state["epoch"], state["batch"], state["seconds"]
        self.sums, self.history = state["sums"], state["history"]
        if self.method.one_per_rank or distributed.rank() == 0:
            # The checkpoint is the truth: rows that came later, or that are damaged, are written anew.
            self.folder.keep_metrics(self.history)
            self.folder.write_traces(self.method.traces)

    def _stopped(self, by: int) -> None:
        name = signal.Signals(by).name if by else "a signal to another process"
        if self.folder is None:
            raise KeyboardInterrupt(f"stopped by {name}; without a folder nothing was saved")
        raise KeyboardInterrupt(
            f"stopped by {name} in epoch {self.epoch + 1}; saved in {self.folder.path}: "
            "start it again with resume=True to continue"
        )
