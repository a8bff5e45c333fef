"""What is killed, and what it should end with: training by every method, and every command that writes.

A new command that resumes is one line in `all_cases`, one that adds files to a finished run one in
`_AFTERWARDS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import torchbayes as tb

from ..conformance.problems import blobs, small_net
from ..processes import forkserver

__all__ = ["Case", "all_cases", "fit_case"]

_ON_DISK = ("sgld", "sghmc", "psgld", "sgnht", "atmc")
_UNTRAINED = ("seconds", "seconds_per_epoch", "peak_memory")
_TABLES = (
    "scores.json", "corruptions.json", "calibration.json", "prune.json", "diagnosis.json", "distill.json",
    "average.json", "average-branching.json", "draws.json", "about.json",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Something to be killed.

    Attributes:
        name: Name in the table.
        go: Begins in a folder, or continues what is there.
        look: Returns what it has ended with, to be compared.
        processes: How many processes do it together.
        others: With how many it may be resumed, and must end with the same.
        begin: Makes what should be in the folder before, undisturbed.
        timed: Whether to kill it at random moments, too: what SQLite does to its file no audit hook sees.
    """

    name: str
    go: Callable[[Path], None]
    look: Callable[[Path], Any]
    processes: int = 1
    others: tuple[int, ...] = (1,)
    begin: Callable[[Path], None] | None = None
    timed: bool = False


def _train(method: str, on_disk: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"sample_folder": str(folder / "bank")} if on_disk else {}
    tb.fit(
        small_net, blobs(), method, epochs=2, batch_size=120, folder=folder / "run", resume=True,
        checkpoint_seconds=0.0, progress=False, **options,
    )  # fmt: skip


def _draws(folder: Path) -> list[bytes]:
    posterior = tb.load(folder / "run" / "posterior.safetensors", small_net())
    generator = torch.Generator().manual_seed(0)
    return [
        b"".join(t.numpy().tobytes() for t in weights.values())
        for weights in posterior.draws(8, generator)
    ]


def fit_case(method: str, on_disk: bool = False) -> Case:
    """Training by one method, with a checkpoint after every update."""
    name = f"{method}, samples on disk" if on_disk else method
    return Case(name, partial(_train, method, on_disk), _draws)


def _command(words: tuple[str, ...], folder: Path) -> None:
    """Run the command line in a folder."""
    from torchbayes.cli import main

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.environ["MPLCONFIGDIR"] = str(folder.parent / "matplotlib")
    os.chdir(folder)
    sys.argv = ["torchbayes", *(word.replace("{here}", str(folder)) for word in words)]
    main()


_RECIPE = """
title = "A small curve"
data = "bbb-curve"
model = "mlp"
epochs = 3
batch_size = 500
samples = 4
[methods.map]
[methods.sgld]
[cpu]
epochs = 2
"""


def _recipe(folder: Path) -> None:
    """Run a recipe of our own; the library's take minutes."""
    from torchbayes.experiments import recipes

    place = folder.parent / "recipes"
    (place / "campaign").mkdir(parents=True, exist_ok=True)
    (place / "campaign" / "curve.toml").write_text(_RECIPE)
    recipes.recipe_folder = lambda: place
    words = ("recipes", "run", "campaign/curve", "--cpu", "--out", "{here}/runs")
    _command((*words, "--results", "{here}/results"), folder)


_TRAINED = {
    "map": ("--data", "digits", "--model-set", "hidden=[8]"),
    "vogn": ("--data", "moons",),
    "sgld": ("--data", "moons", "--set", "samples=4", "--set", "chains=2"),
}  # fmt: skip
_AFTERWARDS = {
    "evaluate": ("map", "evaluate run --corruptions"),
    "calibrate": ("vogn", "calibrate run"),
    "prune": ("vogn", "prune run"),
    "diagnose": ("sgld", "diagnose run"),
    "average": ("sgld", "average run --times 1,2 --out average.json"),
    "distill": ("sgld", "distill run --epochs 2 --resume"),
    "laplace": ("map", "laplace run --samples 4"),
    "export": ("map", "export run --format pt2"),
    "report": ("map", "report run"),
}


def _trained(method: str, folder: Path) -> None:
    """Put a finished run into a folder; it is trained once and kept beside it."""
    place = folder.parent / f"trained-{method}"
    if not (place / "run" / "scores.json").exists():
        words = ("train", *_TRAINED[method], "--method", method, "--epochs", "2", "--samples", "4",
                 "--out", "run")  # fmt: skip
        child = forkserver().Process(target=_command, args=(words, place))
        child.start()
        child.join()
        assert child.exitcode == 0, f"{method} cannot be trained"
    shutil.copytree(place, folder)


def _afterwards(name: str) -> Case:
    """A command that adds files to a finished run; it may be started again as often as you like."""
    method, words = _AFTERWARDS[name]
    go = partial(_command, tuple(words.split()))
    return Case(f"torchbayes {name}", go, _files, begin=partial(_trained, method))


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in _UNTRAINED}
    return [_without_times(v) for v in value] if isinstance(value, list) else value


def _files(folder: Path) -> dict[str, Any]:
    """Return the names of all files, the weights of posteriors, and tables without times."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.name.startswith(".") or "previous" in file.name:
            continue
        content: Any = None
        if file.suffix == ".safetensors" and ("posterior" in file.name or "draw" in file.name):
            state = hashlib.sha256()
            for name, tensor in sorted(load_file(file).items()):
                state.update(name.encode() + tensor.contiguous().numpy().tobytes())
            content = state.hexdigest()
        elif file.name in _TABLES:
            content = _without_times(json.loads(file.read_text()))
            if isinstance(content, dict):
                content.pop("crc32", None)  # of the times, too
        found[str(file.relative_to(folder))] = content
    return found


def _images(folder: Path) -> Path:
    """Make a small folder of images beside the run, once."""
    from PIL import Image

    place = folder.parent / "images"
    if not (place / "done").exists():
        draw = np.random.default_rng(0)
        for split, count in (("train", 12), ("test", 4)):
            for number, name in enumerate(("dark", "light")):
                where = place / split / name
                where.mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    pixels = draw.integers(100 * number, 100 * number + 100, (8, 8, 3))
                    Image.fromarray(pixels.astype(np.uint8)).save(where / f"{i}.png")
        (place / "done").touch()
    return place


def _streamed(folder: Path) -> None:
    from torchbayes.data import load_data
    from torchbayes.data.stream import StreamLoader

    torch.set_num_threads(1)
    data = load_data(f"folder:{_images(folder)}", stream=True)
    loader = StreamLoader(
        data.train, 8, shuffle=True, seed=0, workers=0, transform=lambda x, _: x.float().div(255)
    )
    tb.fit(
        _image_net, loader, "vogn", epochs=2, folder=folder / "run", resume=True,
        checkpoint_seconds=0.0, progress=False,
    )  # fmt: skip


def _image_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4), torch.nn.Linear(4, 2))


def _streamed_draws(folder: Path) -> Any:
    mean = tb.load(folder / "run" / "posterior.safetensors").mean()
    return [t.numpy().tobytes() for t in mean.values()]


_SMALL = ("--data", "moons", "--batch-size", "500")


def all_cases() -> list[Case]:
    """Every method, samplers with their samples on disk, two processes, and every command that resumes."""
    pair = {"processes": 2}
    alike: dict[str, Any] = {**pair, "others": (2,)}
    any_number: dict[str, Any] = {**pair, "others": (1, 2, 3)}
    go = {name: partial(_train, name, False) for name in tb.METHODS}
    commands = {
        "train": ("train", *_SMALL, "--epochs", "2", "--checkpoint-seconds", "0", "--out", "{here}/run",
                  "--resume"),
        "compare": ("compare", *_SMALL, "--methods", "map,sgld", "--epochs", "1", "--samples", "4",
                    "--out", "{here}/compare", "--resume"),
        "continual": ("continual", "--data", "digits", "--tasks", "split", "--per-task", "5", "--epochs", "1",
                      "--hidden", "8", "--samples", "2", "--out", "{here}/tasks", "--resume"),
        "tune": ("tune", *_SMALL, "--trials", "2", "--epochs", "2", "--samples", "2", "--out", "{here}/tune",
                 "--resume"),
    }  # fmt: skip
    return [
        *(fit_case(name) for name in tb.METHODS),
        *(fit_case(name, on_disk=True) for name in _ON_DISK),
        Case("a streamed folder of images", _streamed, _streamed_draws),
        *(Case(f"{n}, two processes", go[n], _draws, **alike) for n in ("map", "vogn", "bbb", "swag")),
        *(Case(f"{n}, two processes", go[n], _draws, **any_number) for n in ("ensemble", "sgld")),
        Case("sghmc, on disk, two processes", partial(_train, "sghmc", True), _draws, **any_number),
        Case("torchbayes recipes run", _recipe, _files),
        *(
            Case(f"torchbayes {name}", partial(_command, words), _files, timed=name == "tune")
            for name, words in commands.items()
        ),
        *map(_afterwards, _AFTERWARDS),
    ]  # fmt: skip
