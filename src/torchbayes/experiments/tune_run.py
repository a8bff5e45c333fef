"""Search for an experiment's options on held-out training examples, and write them as a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from torchbayes._version import __version__
from torchbayes.core.storage import write_text
from torchbayes.data import DataSet, make_loader
from torchbayes.experiments.made_with import made_of
from torchbayes.experiments.options import check_spelling
from torchbayes.experiments.settings import SETTINGS, Experiment
from torchbayes.experiments.training import threads_for
from torchbayes.train.fit import fit
from torchbayes.train.progress import Progress
from torchbayes.train.registry import find_method
from torchbayes.tuning.search import Report, Search, Trial, Tuning
from torchbayes.tuning.space import Space, default_space
from torchbayes.tuning.tune import held_out_nll

__all__ = ["HELD_OUT", "tune_experiment", "tuned", "write_recipe"]

HELD_OUT = 0.2
"""Share of the training set that is held out if the settings name none."""


def tune_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    data: DataSet,
    trials: int,
    space: Space | None = None,
    resume: bool = False,
    progress: Callable[[int], bool | Progress] = lambda number: False,
    after: Callable[[Trial], None] = lambda trial: None,
) -> Tuning:
    """Search for the options of the experiment's method.

    Args:
        experiment: Settings; those options of the method that are not searched for are kept.
        folder: Folder of the search.
        data: Result of `experiment.load_data`, with a validation split.
        trials: Number of trials.
        space: What to try, in the spelling of recipes; by default as for `torchbayes.tune`.
        resume: Go on with the search in the folder.
        progress: Returns the display of the trial with a number.
        after: Called after each trial.
    """
    method = find_method(experiment.method)
    assert data.validation is not None
    if space is None:
        space = {
            name: values
            for name, values in default_space(method, data.train_size).items()
            if name not in experiment.options
        }
    for values in zip(*([space[name][0], space[name][-1]] for name in space), strict=True):
        check_spelling(method, dict(zip(space, values, strict=True)))
    make = experiment.model_factory(data)
    about = {
        "torchbayes": __version__,
        "settings": experiment.settings(),
        **made_of(experiment, data),
    }
    search = Search(
        experiment.method, space, about, folder=folder, resume=resume, epochs=experiment.epochs,
        seed=experiment.seed,
    )  # fmt: skip
    held_out = make_loader(data, data.validation, 512)

    def objective(number: int, options: dict[str, Any], report: Report) -> float:
        loader = make_loader(
            data, data.train, experiment.batch_size, shuffle=True, augment=experiment.augment,
            seed=experiment.seed,
        )  # fmt: skip
        tried = dataclasses.replace(experiment, options={**experiment.options, **options})
        with threads_for(make, experiment.batch_size):
            run = fit(
                make, loader, validation=held_out, progress=progress(number), logger=report,
                **tried.fit_arguments(data, len(loader)),
            )  # fmt: skip
            return held_out_nll(run, held_out, experiment.samples)

    return search.run(objective, trials, after)


def tuned(experiment: Experiment, found: Tuning) -> Experiment:
    """Return the experiment with the options that were found."""
    return dataclasses.replace(experiment, options={**experiment.options, **found.best})


def write_recipe(file: Path, experiment: Experiment, found: Tuning) -> None:
    """Write the settings with the options that were found, for `train --recipe` and `compare --recipe`.

    Args:
        file: The TOML file.
        experiment: Settings of the search.
        found: Its result.
    """
    best = tuned(experiment, found)
    default = "broke down" if found.default_nll is None else f"{found.default_nll:.4f}"
    settings = {k: v for k, v in best.settings().items() if v != SETTINGS[k] or k == "data"}
    settings |= {"method": best.method, "options": best.options}
    title = {
        "title": f"{best.method} on {best.data}, tuned",
        "note": f"Options from {len(found.trials)} trials by `torchbayes tune`: held-out NLL "
        f"{found.nll:.4f}, {default} at the defaults.",
    }
    tables = {"methods": {best.method: best.options}}
    write_text(file, tomli_w.dumps({**title, **settings, **tables}))
