"""`torchbayes train` and `evaluate`: make and score one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer, cell, notice, table

if TYPE_CHECKING:
    from torchbayes.experiments.settings import Experiment
    from torchbayes.experiments.trained_run import TrainedRun
    from torchbayes.train.tracking import Logger

__all__ = ["evaluate", "train"]

_LOGGERS = ("tensorboard", "wandb", "mlflow")

# A classifier has some of these scores, a regression others.
_SHOWN = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "crps": "CRPS",
    "coverage50": "in 50 %",
    "coverage90": "in 90 %",
    "ece": "ECE",
    "brier": "Brier",
    "auroc_misclassification": "AUROC wrong",
    "auroc_ood": "AUROC OOD",
    "auroc_noise": "AUROC noise",
    "seconds": "seconds",
}


def train(
    recipe: opt.Recipe = None,
    cpu: opt.Cpu = False,
    data: opt.Data = None,
    target: opt.Target = None,
    task: opt.Task = None,
    drop: opt.Drop = None,
    split: opt.TableSplit = None,
    test_share: opt.TestShare = None,
    model: opt.Model = None,
    method: Annotated[
        str | None,
        typer.Option(help="Method; `torchbayes methods` lists them.", show_default="map"),
    ] = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    samples: opt.Samples = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", show_default="0")] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Share of the training set to hold out and score.", show_default="0"),
    ] = None,
    augment: opt.Augment = None,
    init: opt.Init = None,
    schedule: opt.ScheduleName = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Largest gradient norm.", show_default="no limit")
    ] = None,
    amp: Annotated[
        str | None,
        typer.Option(help="Mixed precision: bfloat16 or float16.", show_default="none"),
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Gradient-accumulation steps.", show_default="1")
    ] = None,
    set_: opt.Set = None,
    model_set: opt.ModelSet = None,
    setting: opt.Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; runs/DATA-MODEL-METHOD-SEED if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    device: opt.Device = None,
    logger: Annotated[
        str | None,
        typer.Option(
            help="Also record metrics and the posterior: tensorboard (files in --out), wandb or mlflow.",
            show_default="none",
        ),
    ] = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Train a network into a posterior and score it on the test set.

    Example: `torchbayes train --data fashion-mnist --model lenet5 --method ensemble --epochs 10`

    Under torchrun (`torchrun --nproc-per-node 2 -m torchbayes train …`) processes share every batch or
    train ensemble members side by side. Stop with Ctrl-C at any time and continue with `--resume`.
    """
    from torchbayes.core import distributed
    from torchbayes.core.device import process_device
    from torchbayes.experiments.settings import Experiment
    from torchbayes.experiments.trained_run import TrainedRun
    from torchbayes.experiments.training import train_experiment

    flags: dict[str, Any] = {
        "data": data, "model": model, "method": method, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "validation": validation, "augment": augment,
        "schedule": schedule, "clip_norm": clip_norm, "amp": amp, "accumulate": accumulate,
        "init": init,
    }  # fmt: skip
    columns = {
        "target": target, "task": task, "drop": drop, "split": split, "test_share": test_share,
    }  # fmt: skip
    settings = opt.settings_from(recipe, cpu, model_set, setting, flags, columns)
    settings = {k: v for k, v in settings.items() if k not in ("methods", "rows")}
    name = settings.get("method", Experiment.method)
    pairs = opt.method_pairs(set_ or [], {name: name})[name]
    settings["options"] = {**settings.get("options", {}), **pairs}
    experiment = Experiment.from_settings(settings, "the settings")
    folder = out if out is not None else _default_folder(experiment)
    with distributed.process_group(device):
        loaded = experiment.load_data(data_dir)
        if loaded.table is not None and distributed.rank() == 0:
            notice(loaded.note, as_json)
        tracked = None if distributed.rank() else _logger(logger, folder, experiment)
        train_experiment(
            experiment,
            folder,
            data=loaded,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            device=device,
            logger=tracked,
        )
        if distributed.rank() == 0:
            place = process_device(device)
            trained = TrainedRun(folder, data_dir, experiment=experiment, data=loaded, device=place)
            _score(trained, as_json)


def _logger(name: str | None, folder: Path, experiment: Experiment) -> Logger | None:
    """Make the logger of this name; its run has the folder's."""
    if name is None:
        return None
    if name not in _LOGGERS:
        raise ValueError(
            f"--logger is {name!r}: expected {', '.join(_LOGGERS[:-1])} or {_LOGGERS[-1]}"
        )
    config = experiment.settings()
    if name == "wandb":
        from torchbayes.integrations.wandb import WandB

        folder.mkdir(parents=True, exist_ok=True)
        return WandB(config, project="torchbayes", name=folder.name, dir=str(folder))
    if name == "mlflow":
        from torchbayes.integrations.mlflow import MLflow

        return MLflow(config, run_name=folder.name)
    from torchbayes.train.tracking import TensorBoard

    return TensorBoard(folder / "tensorboard")


def _default_folder(experiment: Experiment) -> Path:
    kind, _, place = experiment.data.partition(":")
    data = Path(place or kind).stem if kind == "table" else Path(place or kind).name
    data = f"uci-{data}" if kind == "uci" else data
    return Path("runs") / f"{data}-{experiment.network}-{experiment.method}-{experiment.seed}"


def _score(trained: TrainedRun, as_json: bool, **how: Any) -> None:
    """Score a run, print the scores and draw the curve of a one-dimensional regression."""
    from torchbayes.data import ood_for
    from torchbayes.experiments.evaluation import evaluate

    folder, ood = trained.files.path, ood_for(trained.data, trained.data_dir)
    scores = evaluate(trained, ood=ood, **how)
    shown = {key: title for key, title in _SHOWN.items() if key in scores}
    cells = (cell(scores[key], ".1f" if key == "seconds" else ".4f") for key in shown)
    notes = [f"out of distribution (OOD): {ood.name}"] if "auroc_ood" in scores else []
    encoding, curve = trained.data.encoding, trained.data.shape == (1,)
    if encoding is not None and not encoding.classes:
        notes.append(f"RMSE, NLL and CRPS are in the units of {encoding.target!r}")
    elif not trained.data.classes and curve and trained.data.num_targets == 1:
        _draw_curve(trained)
        notes.append(f"picture: {folder / 'curve.png'}")
    scored = table(str(folder), shown.values(), [cells], left=0)
    about = {} if trained.data.table is None else {"note": trained.data.note}
    answer({"run": str(folder), **scores, **about}, as_json, scored, *notes)


def _draw_curve(trained: TrainedRun) -> None:
    """Draw a one-dimensional regression with its band, as curve.png in the run folder."""
    import torch

    from torchbayes.data import Split
    from torchbayes.data.transform import Normalise
    from torchbayes.plots.curve import regression_figure
    from torchbayes.plots.figure import save_png

    data = trained.data
    assert isinstance(data.train, Split)
    figure = regression_figure(
        trained.model,
        trained.posterior(),
        data.train.inputs,
        data.train.targets,
        likelihood=trained.likelihood(),
        truth=data.truth,
        transform=Normalise(data.mean, data.std),
        generator=torch.Generator().manual_seed(0),
    )
    save_png(figure, trained.files.path / "curve.png")


def evaluate(
    run: opt.RunFolder,
    samples: opt.RunSamples = None,
    last: Annotated[
        bool, typer.Option("--last", help="Score a sampler's last sample alone.")
    ] = False,
    corruptions: Annotated[
        bool,
        typer.Option(
            "--corruptions", help="Also score noisy, blurred and otherwise corrupted test images."
        ),
    ] = False,
    device: opt.Device = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Score a finished run on its test set and on out-of-distribution inputs."""
    from torchbayes.core.device import process_device
    from torchbayes.experiments.trained_run import TrainedRun

    trained = TrainedRun(run, data_dir, device=process_device(device))
    _score(trained, as_json, samples=samples, last=last, corruptions=corruptions)
