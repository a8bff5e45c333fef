"""`torchbayes train`, `evaluate` and `predict`: one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli import options as opt

if TYPE_CHECKING:
    from torchbayes.experiments.settings import Experiment
    from torchbayes.experiments.trained_run import TrainedRun

__all__ = ["evaluate", "predict", "train"]

# A run has some of these: a classifier's or a regression's.
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
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files to --out.")
    ] = False,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Train a network into a posterior and score it on the test set.

    Example: `torchbayes train --data fashion-mnist --model lenet5 --method ensemble --epochs 10`

    Under torchrun (`torchrun --nproc-per-node 2 -m torchbayes train …`) processes share every batch or
    train ensemble members side by side. Stop with Ctrl-C at any time and continue with `--resume`.
    """
    from torchbayes.core import distributed
    from torchbayes.experiments.settings import Experiment
    from torchbayes.experiments.trained_run import TrainedRun
    from torchbayes.experiments.training import train_experiment
    from torchbayes.train.tracking import TensorBoard

    flags: dict[str, Any] = {
        "data": data, "model": model, "method": method, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "validation": validation, "augment": augment,
        "schedule": schedule, "clip_norm": clip_norm, "amp": amp, "accumulate": accumulate,
    }  # fmt: skip
    settings = opt.settings_from(recipe, cpu, model_set, setting, flags)
    settings.pop("methods", None)
    settings.pop("rows", None)
    name = settings.get("method", Experiment.method)
    pairs = opt.method_pairs(set_ or [], {name: name})[name]
    settings["options"] = {**settings.get("options", {}), **pairs}
    experiment = Experiment.from_settings(settings, "the settings")
    folder = out if out is not None else _default_folder(experiment)
    with distributed.process_group():
        loaded = experiment.load_data(data_dir)
        tracked = tensorboard and distributed.rank() == 0
        train_experiment(
            experiment,
            folder,
            data=loaded,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            logger=TensorBoard(folder / "tensorboard") if tracked else None,
        )
        if distributed.rank() == 0:
            trained = TrainedRun(folder, data_dir, experiment=experiment, data=loaded)
            _score(trained, as_json)


def _default_folder(experiment: Experiment) -> Path:
    data = Path(experiment.data.removeprefix("folder:")).name
    return Path("runs") / f"{data}-{experiment.network}-{experiment.method}-{experiment.seed}"


def _score(trained: TrainedRun, as_json: bool, **how: Any) -> None:
    """Score a run, print the scores and draw what can be drawn of it."""
    from torchbayes.data import ood_for
    from torchbayes.experiments.evaluation import evaluate

    folder, ood = trained.files.path, ood_for(trained.data, trained.data_dir)
    scores = evaluate(trained, ood=ood, **how)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **scores}))
    else:
        table = Table(title=str(folder), title_justify="left")
        shown = [key for key in _SHOWN if key in scores]
        for key in shown:
            table.add_column(_SHOWN[key], justify="right")
        table.add_row(*(_number(key, scores[key]) for key in shown))
        Console().print(table)
        if "auroc_ood" in scores:
            Console().print(f"out of distribution (OOD): {ood.name}")
    _picture(trained, as_json)


def _picture(trained: TrainedRun, quiet: bool) -> None:
    """Draw a regression of one input with its band, as curve.png in the run folder."""
    import torch

    from torchbayes.core.storage import atomic_path
    from torchbayes.data import Split
    from torchbayes.data.transform import Normalise
    from torchbayes.plots.curve import regression_figure

    data = trained.data
    if data.classes or data.shape != (1,) or data.num_targets != 1:
        return
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
    with atomic_path(trained.files.path / "curve.png") as temporary:
        figure.savefig(temporary, format="png")
    if not quiet:
        Console().print(f"picture: {trained.files.path / 'curve.png'}")


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if key == "seconds" else f"{value:.4f}"


def evaluate(
    run: opt.RunFolder,
    samples: opt.RunSamples = None,
    last: Annotated[
        bool, typer.Option("--last", help="Score only the last of a sampler's samples.")
    ] = False,
    corruptions: Annotated[
        bool,
        typer.Option(
            "--corruptions", help="Also score noisy, blurred and otherwise damaged test images."
        ),
    ] = False,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Score a finished run on its test set and on out-of-distribution inputs."""
    from torchbayes.experiments.trained_run import TrainedRun

    trained = TrainedRun(run, data_dir)
    _score(trained, as_json, samples=samples, last=last, corruptions=corruptions)


def predict(
    run: opt.RunFolder,
    files: Annotated[list[Path], typer.Argument(help="Image files.")],
    samples: opt.RunSamples = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Classify image files and say how sure the network is and where its uncertainty comes from.

    *Epistemic* uncertainty means that the network has not seen enough images of this kind; *aleatoric*,
    that the image itself is ambiguous. Both are in nats.
    """
    import torch

    from torchbayes.data import read_image
    from torchbayes.data.transform import Normalise
    from torchbayes.experiments.trained_run import TrainedRun
    from torchbayes.predict.results import ClassPredictive

    trained = TrainedRun(run, data_dir)
    if len(trained.data.shape) != 3:
        raise ValueError(f"{run} was trained on {trained.data.name}, which has no images")
    images = torch.stack([read_image(file, trained.data.shape) for file in files])
    normalise = Normalise(trained.data.mean, trained.data.std)
    result = trained.predict(normalise(images, torch.Generator()), samples)
    if not isinstance(result, ClassPredictive):
        raise ValueError(f"{run} is a regression on {trained.data.name}: predict names classes")
    rows = [
        {
            "file": str(file),
            "class": trained.data.classes[int(result.prediction[i])],
            "confidence": float(result.confidence[i]),
            "entropy": float(result.entropy[i]),
            "aleatoric": float(result.aleatoric[i]),
            "epistemic": float(result.epistemic[i]),
        }
        for i, file in enumerate(files)
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("file", "class") else "right")
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.3f}" for v in row.values()))
    Console().print(table)
