"""A search that several processes can share and that survives a kill at any moment.

T. Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019, with its
tree-structured Parzen estimator and median pruning. The first trial is always the method at its defaults, so
that the best is at least as good. What Optuna proposes depends on the finished trials and the seed alone: a
search that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

from filelock import FileLock

from torchbayes.core.errors import FileError, RunError
from torchbayes.core.locks import lock_file
from torchbayes.core.storage import remove_strays
from torchbayes.train.failures import TrainingError
from torchbayes.tuning.space import Space, check_space, is_range, on_log_scale

__all__ = ["Pruned", "Report", "Search", "Trial", "Tuning"]

_STUDY = "torchbayes"
_WAIT = 8  # trials before proposals and pruning begin
_OVER = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}

# What searches of older versions do not say.
_LATER = ("data_checksum", "init_checksum", "reset_weights", "table_sha256")

_STORES = ("sqlalchemy", "sqlite3", "optuna", "alembic")


class Pruned(Exception):
    """A trial is behind the others and ends early."""


@dataclass(frozen=True)
class Trial:
    """One attempt.

    Attributes:
        number: Its place in the order in which trials began.
        options: What was tried; empty for the defaults.
        nll: Held-out negative log-likelihood per example; None if it did not end well.
        state: `"complete"`, `"pruned"` or `"failed"`.
        why: What broke down.
    """

    number: int
    options: dict[str, Any]
    nll: float | None
    state: str
    why: str = ""


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        method: Name of the method.
        trials: All of them, in order.
    """

    method: str
    trials: list[Trial]

    @property
    def best_trial(self) -> Trial:
        """The trial with the smallest held-out NLL."""
        finished = [t for t in self.trials if t.nll is not None]
        if not finished:
            why = next((t.why for t in self.trials if t.why), "all were stopped")
            raise ValueError(
                f"none of the {len(self.trials)} trials of {self.method} ended well: {why}"
            )
        return min(finished, key=lambda t: (math.inf if t.nll is None else t.nll, t.number))

    @property
    def best(self) -> dict[str, Any]:
        """Its options, for `fit`; empty if nothing was better than the defaults."""
        return dict(self.best_trial.options)

    @property
    def nll(self) -> float:
        """Its held-out NLL."""
        return self.best_trial.nll  # type: ignore[return-value]

    @property
    def default_nll(self) -> float | None:
        """The held-out NLL of the defaults, which are the first trial; None if they broke down."""
        return next((t.nll for t in self.trials if not t.options), None)

    def __repr__(self) -> str:
        states = [t.state for t in self.trials]
        ends = ", ".join(f"{states.count(s)} {s}" for s in ("pruned", "failed") if s in states)
        tried = f"{len(states)} trials" + (f", {ends}" if ends else "")
        if not any(t.nll is not None for t in self.trials):
            return f"Tuning({self.method}, {tried})"
        usual = "–" if self.default_nll is None else f"{self.default_nll:.4f}"
        return f"Tuning({self.method}, {tried}: NLL {self.nll:.4f} with {self.best}, {usual} at the defaults)"


class Report:
    """Receives the scores of a trial's epochs as a logger of `fit`, and stops a trial that is behind."""

    def __init__(self, trial: Any) -> None:
        self._trial, self._epoch = trial, 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take the scores of an epoch."""
        self._epoch += 1
        nll = values.get("validation_nll", math.nan)
        if not math.isfinite(nll):
            return
        self._trial.report(nll, self._epoch)
        if self._trial.should_prune():
            raise Pruned

    def artifact(self, path: Path) -> None:
        """Nothing: trials keep no files."""


Objective = Callable[[int, dict[str, Any], Report], float]
"""Trains with some options; takes the trial's number, the options and the report, returns the NLL."""


class Search:
    """A search for options, in a folder that processes can share, or in memory.

    Args:
        method: Name of the method.
        space: What to try.
        about: What the scores depend on besides the options, to be compared when a search is resumed; it
            has to be what JSON can hold.
        folder: Folder of the search; in memory if None.
        resume: Whether to go on with what the folder has.
        epochs: Epochs of a trial: pruning begins after a quarter of them.
        seed: Seed of the proposals.
    """

    def __init__(
        self, method: str, space: Space, about: Mapping[str, Any], *, folder: Path | None = None,
        resume: bool = False, epochs: int = 10, seed: int = 0,
    ) -> None:  # fmt: skip
        optuna = _optuna()
        check_space(space)
        self.method, self._space, self._seed, self._folder = method, space, seed, folder
        self._optuna = optuna
        storage = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            remove_strays(folder)
            if (folder / "study.db").exists() and not resume:
                raise RunError(
                    f"{folder} already holds a search: resume it with resume=True or choose another folder"
                )
            storage = f"sqlite:///{(folder / 'study.db').as_posix()}"
        pruner = optuna.pruners.MedianPruner(_WAIT, n_warmup_steps=max(1, epochs // 4))
        with self._alone(), self._guarded():
            self._study = optuna.create_study(
                storage=storage, study_name=_STUDY, pruner=pruner, load_if_exists=True
            )
            self._check(json.loads(json.dumps({**about, "space": space, "seed": seed})))

    def _check(self, about: dict[str, Any]) -> None:
        before = self._study.user_attrs.get("about")
        if before is None:
            self._study.set_user_attr("about", about)
            return
        for key in [*about, *before]:
            if key in _LATER and key not in before:
                continue
            if before.get(key) != about.get(key):
                raise RunError(
                    f"{self._folder} holds a search with {key} {before.get(key)!r}, not {about.get(key)!r}: "
                    "choose another folder, or the same settings"
                )

    def run(
        self, objective: Objective, trials: int, after: Callable[[Trial], None] = lambda trial: None
    ) -> Tuning:
        """Try until there are `trials` trials, those of other processes included.

        Args:
            objective: Trains and scores.
            trials: Number of trials, of which the first is the defaults.
            after: Called after each of this process's trials.
        """
        if trials < 1:
            raise ValueError(f"trials is {trials}: expected a whole number of at least 1")
        while True:
            with contextlib.ExitStack() as held:
                with self._alone(), self._guarded():
                    self._bury()
                    if self._begun() >= trials:
                        break
                    trial, options = self._ask()
                    held.enter_context(self._claimed(trial.number))
                self._attempt(objective, trial, options)
            after(self._trial(self._study.trials[trial.number]))
        return self.result()

    def result(self) -> Tuning:
        """Return all finished trials."""
        with self._guarded():
            found = [t for t in self._study.trials if t.state.name in _OVER and not _lost(t)]
        return Tuning(self.method, [self._trial(t) for t in found])

    def _attempt(self, objective: Objective, trial: Any, options: dict[str, Any]) -> None:
        states = self._optuna.trial.TrialState
        try:
            nll = objective(trial.number, options, Report(trial))
        except Pruned:
            with self._guarded():
                self._study.tell(trial, state=states.PRUNED)
            return
        except (TrainingError, FloatingPointError) as error:
            why = str(error)
        else:
            if math.isfinite(nll):
                with self._guarded():
                    self._study.tell(trial, nll)
                return
            why = f"the held-out NLL is {nll}"
        with self._guarded():
            trial.set_user_attr("why", why)
            self._study.tell(trial, state=states.FAIL)

    def _ask(self) -> tuple[Any, dict[str, Any]]:
        number = self._begun()
        if not any(t.user_attrs.get("defaults") and not _lost(t) for t in self._study.trials):
            trial = self._study.ask()
            trial.set_user_attr("defaults", True)
            return trial, {}
        # A sampler of its own for each trial: what it proposes does not depend on who ran the others.
        self._study.sampler = self._optuna.samplers.TPESampler(
            n_startup_trials=_WAIT, seed=self._seed + number
        )
        trial = self._study.ask()
        return trial, {name: self._suggest(trial, name) for name in self._space}

    def _suggest(self, trial: Any, name: str) -> Any:
        values = self._space[name]
        if not is_range(values):
            return trial.suggest_categorical(name, list(values))
        low, high = values
        log = on_log_scale(low, high)
        whole = isinstance(low, int) and isinstance(high, int)
        return (trial.suggest_int if whole else trial.suggest_float)(name, low, high, log=log)

    def _trial(self, found: Any) -> Trial:
        state = _OVER.get(found.state.name, "running")
        nll = found.value if state == "complete" else None
        return Trial(found.number, dict(found.params), nll, state, found.user_attrs.get("why", ""))

    def _begun(self) -> int:
        # One that waits to be tried again is tried by the next that asks.
        return sum(not _lost(t) and t.state.name != "WAITING" for t in self._study.trials)

    def _bury(self) -> None:
        """Mark the trials whose process has died, and have their options tried again."""
        if self._folder is None:
            return
        states, storage = self._optuna.trial.TrialState, self._study._storage
        for found in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            handle = self._open(found.number)
            try:
                if not lock_file(handle):
                    continue
                self._lock_of(found.number).unlink(missing_ok=True)
                # Whoever ends a trial tells so before it lets go of the lock.
                if storage.get_trial(found._trial_id).state.is_finished():
                    continue
                storage.set_trial_user_attr(found._trial_id, "lost", True)
                self._study.tell(found.number, state=states.FAIL)
                if found.params:
                    self._study.enqueue_trial(found.params)
            finally:
                os.close(handle)

    def _lock_of(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f".trial-{number}.lock"

    def _open(self, number: int) -> int:
        return os.open(self._lock_of(number), os.O_RDWR | os.O_CREAT, 0o666)

    @contextlib.contextmanager
    def _claimed(self, number: int) -> Iterator[None]:
        """Hold a trial's lock, which ends with this process: others see by it that the trial is alive."""
        if self._folder is None:
            yield
            return
        handle = self._open(number)
        try:
            lock_file(handle)
            yield
        finally:
            with contextlib.suppress(OSError):
                self._lock_of(number).unlink()
            os.close(handle)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from counting and asking meanwhile."""
        if self._folder is None:
            yield
            return
        with FileLock(self._folder / ".ask.lock"):
            yield

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn what the data base raises into one sentence."""
        try:
            yield
        except Exception as error:
            # What is wrong with a damaged file optuna says in errors of Python's own, too.
            where = [
                frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)
            ]
            if not any(name.startswith(_STORES) for name in (type(error).__module__, where[-1])):
                raise
            why = str(error).strip().splitlines()[0]
            raise FileError(
                f"the search in {self._folder} cannot be read or written ({why}): restore study.db, or "
                "choose another folder"
            ) from error


def _lost(trial: Any) -> bool:
    return bool(trial.user_attrs.get("lost"))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("Optuna is not installed: pip install 'torchbayes[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
