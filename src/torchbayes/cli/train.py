"""`torchbayes train`, `evaluate` and `predict`: one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchbayes.cli.options import DataDir, Json, Settings, method_pairs, settings_from
from torchbayes.core import distributed
from torchbayes.core.storage import atomic_path
from torchbayes.data import Split, read_image
from torchbayes.data.transform import Normalise
from torchbayes.experiments.evaluation import evaluate as evaluated
from torchbayes.experiments.settings import Experiment
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.experiments.training import train_experiment
from torchbayes.plots.curve import regression_figure
from torchbayes.predict.results import ClassPredictive
from torchbayes.train.tracking import TensorBoard

__all__ = ["evaluate", "predict", "train"]

# Of these, those that a run has: a classifier's or a regression's.
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
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file of settings; flags override it.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the recipe's CPU-sized version.")] = False,
    data: Annotated[
        str | None, typer.Option(help="Data set (`torchbayes data`) or a folder of images.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Network (`torchbayes models`).")] = None,
    method: Annotated[str | None, typer.Option(help="Method (`torchbayes methods`).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes through the training set.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per update.")] = None,
    samples: Annotated[int | None, typer.Option(help="Draws to predict with.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of the training set to hold out.")
    ] = None,
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="The data's usual augmentation.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Learning rate: constant, cosine, linear, step or cyclic.")
    ] = None,
    milestones: Annotated[
        str | None, typer.Option(help="Epochs at which a step schedule drops: 80,120.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="The factor that it drops by.")] = None,
    warmup_epochs: Annotated[
        float | None, typer.Option(help="Epochs of linear rise at the start.")
    ] = None,
    cycles: Annotated[int | None, typer.Option(help="Cycles of a cyclic schedule.")] = None,
    low: Annotated[
        float | None, typer.Option(help="What a cycle falls to, as a fraction of the rate.")
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    amp: Annotated[str | None, typer.Option(help="bfloat16 or float16 mixed precision.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Pieces in which each gradient is computed.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A method's option, such as --set lr=0.01; repeatable."),
    ] = None,
    model_set: Annotated[
        list[str] | None,
        typer.Option(help="A network's option, such as --model-set hidden=[64,64]; repeatable."),
    ] = None,
    setting: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; runs/DATA-MODEL-METHOD-SEED if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between checkpoints.")] = 30.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files to --out.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train a network into a posterior and score it on the test set.

    Example: `torchbayes train --data fashion-mnist --model lenet5 --method ensemble --epochs 10`

    Under torchrun (`torchrun --nproc-per-node 2 -m torchbayes train …`) processes share every batch, or
    train ensemble members side by side. Stop it with Ctrl-C at any time and go on with `--resume`.
    """
    drops = None if milestones is None else _milestones(milestones)
    flags: dict[str, Any] = {
        "data": data, "model": model, "method": method, "epochs": epochs, "batch_size": batch_size,
        "samples": samples, "seed": seed, "validation": validation, "augment": augment,
        "schedule": schedule, "milestones": drops, "gamma": gamma, "warmup_epochs": warmup_epochs,
        "cycles": cycles, "low": low, "clip_norm": clip_norm, "amp": amp, "accumulate": accumulate,
    }  # fmt: skip
    settings = settings_from(
        recipe, cpu, model_set if model_set else [], setting if setting else [], flags
    )
    settings.pop("methods", None)
    settings.pop("rows", None)
    name = settings.get("method", Experiment.method)
    pairs = method_pairs(set_ if set_ else [], {name: name})[name]
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
            _show(folder, evaluated(trained), as_json)
            _picture(trained, as_json)


def _milestones(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"milestones is {text!r}: expected epochs such as 80,120") from None


def _default_folder(experiment: Experiment) -> Path:
    data = Path(experiment.data.removeprefix("folder:")).name
    return Path("runs") / f"{data}-{experiment.network}-{experiment.method}-{experiment.seed}"


def _show(folder: Path, scores: dict[str, float | None], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **scores}))
        return
    table = Table(title=str(folder), title_justify="left")
    shown = [key for key in _SHOWN if key in scores]
    for key in shown:
        table.add_column(_SHOWN[key], justify="right")
    table.add_row(*(_number(key, scores[key]) for key in shown))
    Console().print(table)


def _picture(trained: TrainedRun, quiet: bool) -> None:
    """Draw a regression of one input with its band, as curve.png in the run folder."""
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
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    samples: Annotated[int | None, typer.Option(help="Draws to predict with.")] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Score the last of a sampler's samples alone.")
    ] = False,
    corruptions: Annotated[
        bool,
        typer.Option(
            "--corruptions", help="Score test images with noise, blur and other damage too."
        ),
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Score a finished run on its test set and on out-of-distribution inputs."""
    trained = TrainedRun(run, data_dir)
    _show(run, evaluated(trained, samples, last=last, corruptions=corruptions), as_json)
    _picture(trained, as_json)


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    files: Annotated[list[Path], typer.Argument(help="Image files.")],
    samples: Annotated[int | None, typer.Option(help="Draws to predict with.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Classify image files, each with how sure the network is and why not surer.

    *Epistemic* uncertainty means that the network has not seen enough of its like; *aleatoric*, that the
    image itself is ambiguous. Both in nats.
    """
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
