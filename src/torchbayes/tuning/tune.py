"""`tune`: the options of a method that are best on held-out data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.arrays import in_memory
from torchbayes.core.batch import as_labels, map_tensors, split_batch
from torchbayes.data.order import EpochLoader
from torchbayes.predict.predictive import predictive
from torchbayes.train.data import as_loader, spelled
from torchbayes.train.fit import fit
from torchbayes.train.identity import data_checksum
from torchbayes.train.progress import NoProgress, Progress, RichProgress
from torchbayes.train.registry import check_options, find_method
from torchbayes.train.run import Run
from torchbayes.tuning.search import Report, Search, Trial, Tuning
from torchbayes.tuning.space import Space, default_space

__all__ = ["held_out_nll", "tune"]


def tune(
    model: nn.Module | Callable[[], nn.Module],
    train_set: Any,
    targets: Any = None,
    method: str = "map",
    *,
    validation: Any = 0.2,
    trials: int = 20,
    space: Space | None = None,
    samples: int = 32,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **arguments: Any,
) -> Tuning:
    """Search for the options of a method with the smallest negative log-likelihood of held-out data.

    The first trial is the method at its defaults. Trials that are behind the others after some epochs end
    early. With a `folder` the search can be stopped at any moment and resumed, and several processes that are
    started with the same folder and `resume=True` share it.

    Args:
        model: The network, or a function that makes one, as for `fit`.
        train_set: Training data, as for `fit`.
        targets: The targets, if `train_set` is the inputs alone; or the name of the method.
        method: Name of a method.
        validation: Held-out data in any of the forms of `train_set`, or the share of the training set to
            hold out, which then has to be in memory.
        trials: Number of trials.
        space: What to try: a tuple (lowest, highest) of numbers or a list of choices for each option, also
            for `epochs` and `batch_size`. If None, the learning rate around its default and the prior's
            precision.
        samples: Posterior draws to score with.
        seed: Random seed of training and of the search.
        folder: Folder of the search.
        resume: Go on with the search in `folder`.
        progress: Show a progress bar for each trial.
        **arguments: Arguments of `fit` that all trials share, such as `epochs`, and options of the method.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.randn(200, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> found = tb.tune(torch.nn.Linear(2, 2), (x, y), "map", trials=3, epochs=2, progress=False)
        >>> run = tb.fit(torch.nn.Linear(2, 2), (x, y), "map", epochs=2, progress=False, **found.best)
        >>> found.nll <= found.default_nll
        True
    """
    train_set, method = spelled(train_set, targets, method)
    algorithm = find_method(method)
    own = inspect.signature(fit).parameters
    check_options(algorithm, [name for name in arguments if name not in own])
    if isinstance(validation, float):
        train_set, validation = _divided(train_set, validation, seed)
    batch_size = arguments.get("batch_size", own["batch_size"].default)
    loader = as_loader(
        train_set, batch_size, seed, None, (0, 1), train_size=arguments.get("train_size")
    )
    if space is None:
        space = default_space(algorithm, loader.num_examples)
    check_options(algorithm, [name for name in space if name not in own])
    twice = [name for name in space if name in arguments]
    if twice:
        raise ValueError(f"{twice[0]} is both given and in the space to search: leave out one")
    epochs = arguments.get("epochs", own["epochs"].default)
    about = {
        "method": method, "examples": loader.num_examples, "samples": samples,
        "arguments": {name: repr(value) for name, value in sorted(arguments.items())},
    }  # fmt: skip
    place = None if folder is None else Path(folder)
    if place is not None:
        about["data_checksum"] = data_checksum(loader)
    search = Search(
        method, space, about, folder=place, resume=resume, epochs=epochs or 10, seed=seed
    )
    held_out = as_loader(
        validation, 512, 0, arguments.get("transform"), (0, 1), shuffle=False,
        split=arguments.get("split", True),
    )  # fmt: skip

    def objective(number: int, options: dict[str, Any], report: Report) -> float:
        shown: Progress = RichProgress() if progress else NoProgress()
        shown.note(f"trial {number + 1} of {trials}: {options or 'the defaults'}")
        with warnings.catch_warnings(record=number > 0) as said:
            if number > 0:  # a search tries bad settings, too: of those, warnings are notes
                warnings.simplefilter("always", UserWarning)
            run = fit(
                model, train_set, method=method, validation=held_out, seed=seed, progress=shown,
                logger=report, **{**arguments, **options},
            )  # fmt: skip
        for warning in said or ():
            shown.note(f"trial {number + 1}: {warning.message}")
        return held_out_nll(run, held_out, samples)

    def after(trial: Trial) -> None:
        if progress:
            ended = trial.state if trial.nll is None else f"held-out NLL {trial.nll:.4f}"
            RichProgress().note(f"trial {trial.number + 1}: {ended}")

    return search.run(objective, trials, after)


def held_out_nll(run: Run, held_out: EpochLoader, samples: int) -> float:
    """Return the negative log-likelihood of held-out data under the posterior's prediction, per example."""
    total, count = 0.0, 0
    for batch in held_out.batches(0):
        inputs, targets = split_batch(batch)
        assert targets is not None
        p = predictive(
            run.model, run.posterior, inputs, samples, run.likelihood,
            torch.Generator().manual_seed(0), output=run.output, split=held_out.splits,
            recalibrate=False,
        )  # fmt: skip
        log_probs = p.log_prob(as_labels(targets).to(p.prediction.device))
        total, count = total - float(log_probs.double().sum()), count + log_probs.numel()
    return total / max(1, count)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor[rows]


def _divided(train_set: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Hold out a share of data in memory."""
    if not 0 < share < 1:
        raise ValueError(f"validation is {share:g}: expected a share between 0 and 1, or data")
    given = in_memory(train_set)
    if given is None:
        raise ValueError(
            f"validation is a share, {share:g}, but a {type(train_set).__name__} cannot be divided: pass "
            "held-out data in validation"
        )
    inputs, targets, weights = given
    size = len(targets)
    held = max(1, round(share * size))
    if held >= size:
        raise ValueError(f"validation is {share:g}, but there are only {size} examples")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    parts = []
    for rows in (order[held:], order[:held]):
        pair = map_tensors(inputs, partial(_rows, rows=rows)), targets[rows]
        parts.append(pair if weights is None else (*pair, weights[rows]))
    return parts[0], parts[1]
