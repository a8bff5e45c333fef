"""Damage files of every format and read them: a clean error or the old content, nothing else.

Most damage is blind: flipped bits, cuts, pieces that are removed, added, doubled or zeroed, other digits.
Some knows the format: an entry of the header or table is removed, or is of another type or size, and the
checksum is computed anew. Such a file is as sound as any, so it may be read; what it must not do is raise an
error that is none of ours, or take memory.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import random
import resource
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors.torch import load, save_file

import torchbayes as tb
from torchbayes.applications.continual import TaskScores, _Kept
from torchbayes.core.errors import FileError
from torchbayes.core.reading import json_line, read_json, toml_text, tomllib
from torchbayes.core.storage import checksum, json_checksum, write_json
from torchbayes.data import DataError, TableEncoding, load_data
from torchbayes.data.cifar import read_cifar
from torchbayes.data.idx import read_idx
from torchbayes.data.images import read_image
from torchbayes.data.svhn import read_svhn
from torchbayes.experiments.cost import read_peak
from torchbayes.experiments.recipes import recipe_settings
from torchbayes.experiments.record import Record
from torchbayes.experiments.saved_predictions import Predictions, RegressionPredictions
from torchbayes.report import load_results, render_page
from torchbayes.train.run_folder import RunFolder
from torchbayes.tuning.search import Search

from ..conformance.problems import blobs, small_net
from ..train.test_checkpoint import same

__all__ = ["Format", "formats", "rounds", "verdict"]

_ROOT = Path(__file__).resolve().parents[2]
_MEMORY = 2 << 30
_FORGED = 0.2
_COMMANDS = 0.08


@dataclass(frozen=True)
class Format:
    """A file to be damaged.

    Attributes:
        name: Name in the table.
        file: The sound file.
        read: Reads it and returns its content.
        sealed: Whether it has a checksum, so that damage must not be read as something else.
        command: Whether a whole command reads it, which takes long: it is damaged in some of the turns only.
    """

    name: str
    file: Path
    read: Callable[[], Any]
    sealed: bool = True
    command: bool = False


def formats(folder: Path) -> list[Format]:
    """Make one file of every format."""
    run = RunFolder(folder / "run")
    options = {"epochs": 3, "progress": False, "folder": run.path}
    made = tb.fit(
        small_net, blobs(), "sgld", sample_folder=str(folder / "bank"), samples=2, **options
    )
    run.checkpoint.previous.unlink()  # damage must be an error, not a return to the generation before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a calibration of so few examples
        made.calibrate(blobs(60, seed=2))
    made.save(folder / "run")
    tb.Point(tb.snapshot(small_net())).save(folder / "posterior.safetensors")
    save_file(small_net().state_dict(), folder / "foreign.safetensors")
    write_json(
        folder / "scores.json", {"nll": 0.25, "runs": [{"seed": 0, "ece": 1e-3}], "note": "ε"}
    )
    probs = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    Predictions(probs, probs[:, 0], torch.arange(40) % 3).save(folder / "predictions.npz")
    part = RunFolder(folder / "part")
    tb.fit(small_net(), blobs(), params="2.*", folder=part.path, epochs=1, progress=False)
    (folder / "things.csv").write_text(
        "size,colour,price\n"
        + "".join(f"{i},{'red' if i % 3 else 'blue'},{i % 7}\n" for i in range(40))
    )
    encoding = load_data(f"table:{folder / 'things.csv'}").encoding
    assert encoding is not None
    encoding.save(folder / "table.json")
    network = small_net()
    laplace = {"structure": "diagonal", "folder": folder, "check": False}
    tb.Laplace(network, blobs(), **laplace)
    _data_files(folder)

    def weights(path: Path) -> Callable[[], Any]:
        def read() -> Any:
            posterior = tb.load(path, small_net())
            return [
                dict(w)
                for w in (posterior if isinstance(posterior, tb.Samples) else posterior.draws(2))
            ]

        return read

    def frozen() -> Any:
        network = small_net()
        part.read_rest(network)
        return tb.snapshot(network, ["0.weight", "0.bias"])

    def start() -> Any:
        from torchbayes.train.start import start_of

        start_of(folder / "foreign.safetensors", None, small_net(), several=False)

    def noise() -> Any:
        likelihood = run.read_likelihood()
        return [repr(likelihood), likelihood.state_dict()]

    def cifar() -> Any:
        file = folder / "cifar.bin"
        return read_cifar(bytearray(file.read_bytes()), file).targets

    write_json(folder / "compare" / "results.json", _results(run))
    page = _page_files(folder / "page", run)

    def shown() -> Any:
        found = load_results(page)
        if found.problems:  # which the page shows instead of the damaged file
            raise FileError(found.problems[0])
        return render_page(found)

    kept = _Kept(folder / "tasks", {"method": "map", "task_checksums": ["0"], "seed": 0})
    kept.keep(
        small_net(), tb.Point(tb.snapshot(small_net())), TaskScores("map", ["a"], [[0.5]], [1.0])
    )
    shutil.copy(next((_ROOT / "results" / "demo").glob("*.json")), folder / "record.json")
    searched = {"folder": folder / "search", "resume": True, "epochs": 1}
    Search("map", {"lr": (0.1, 1.0)}, {}, **searched).run(lambda *_: 0.5, 2)

    def tasks() -> Any:
        network, scores = small_net(), TaskScores("map", ["a"])
        kept.restore(network, scores)
        return [scores.accuracy, scores.seconds, tb.snapshot(network)]

    def trials() -> Any:
        found = Search("map", {"lr": (0.1, 1.0)}, {}, **searched).result().trials
        return [repr(trial) for trial in found]

    RegressionPredictions(probs[None], probs[None] + 0.1, probs).save(folder / "regression.npz")
    pictures = np.zeros((3, 1, 4, 4), np.uint8)
    np.savez_compressed(page / "images.npz", test=pictures, ood=pictures)
    pair = RunFolder(shutil.copytree(run.path, folder / "pair"), 1)
    (pair.path / "checkpoint.safetensors").rename(pair.checkpoint.newest)
    (pair.path / "metrics.jsonl").rename(pair.metrics_file)
    yacht = folder / "uci" / "yacht"

    def split() -> Any:
        data = load_data("uci:yacht", data_dir=folder)
        return [data.train.inputs, data.train.targets, data.test.inputs]

    plain = {
        **{f"uci: {name}": (yacht / name, split) for name in _YACHT},
        "svhn.mat": (folder / "svhn.mat", lambda: read_svhn(folder / "svhn.mat").inputs),
        "record.json": (folder / "record.json", lambda: repr(Record.load(folder / "record.json"))),
        "study.db": (folder / "search" / "study.db", trials),
        "idx.gz": (folder / "digits.gz", lambda: read_idx(folder / "digits.gz")),
        "cifar.bin": (folder / "cifar.bin", cifar),
        "table.csv": (
            folder / "things.csv", lambda: load_data(f"table:{folder / 'things.csv'}").shape,
        ),
        "image.png": (folder / "image.png", lambda: read_image(folder / "image.png", (3, 9, 9))),
        "recipe.toml": (folder / "recipe.toml", lambda: recipe_settings(folder / "recipe.toml", cpu=True)),
        "weights.safetensors of another program": (folder / "foreign.safetensors", start),
    }  # fmt: skip
    return [
        Format("checkpoint.safetensors", run.checkpoint.newest, run.checkpoint.read),
        Format("checkpoint-rank1.safetensors", pair.checkpoint.newest, pair.checkpoint.read),
        Format("metrics-rank1.jsonl", pair.metrics_file, pair.read_metrics),
        Format("config.toml", run.config_file, run.read_config),
        Format("metrics.jsonl", run.metrics_file, run.read_metrics),
        Format("traces.jsonl", run.traces_file, run.read_traces),
        Format("likelihood.safetensors", run.likelihood_file, noise),
        Format("inputs.json", run.inputs_file, lambda: vars(run.read_preprocessing())),
        Format("calibration.json", run.path / "calibration.json", lambda: repr(run.read_calibration())),
        Format("posterior.safetensors", folder / "posterior.safetensors",
               weights(folder / "posterior.safetensors")),
        Format("rest.safetensors", part.rest_file, frozen),
        Format("laplace.safetensors", folder / "laplace.safetensors",
               lambda: tb.Laplace(network, blobs(), **laplace).posterior().std()),
        Format("table.json", folder / "table.json", lambda: vars(TableEncoding.load(folder / "table.json"))),
        Format("bank.json", folder / "bank" / "bank.json", weights(folder / "bank")),
        Format("draw.safetensors", folder / "bank" / "draw-000001.safetensors", weights(folder / "bank")),
        Format("scores.json", folder / "scores.json", lambda: read_json(folder / "scores.json", "")),
        Format("results.json", folder / "compare" / "results.json",
               lambda: render_page(load_results(folder / "compare"))),
        *(Format(name, page / name, shown) for name in _PAGE),
        Format("cost.json", page / "cost.json", lambda: read_peak(page / "cost.json", "train it again")),
        Format("tasks.json", kept.file, tasks),
        Format("predictions.npz", folder / "predictions.npz",
               lambda: vars(Predictions.load(folder / "predictions.npz"))),
        Format("regression.npz", folder / "regression.npz",
               lambda: vars(RegressionPredictions.load(folder / "regression.npz"))),
        Format("images.npz", page / "images.npz", shown),
        *(Format(name, file, read, sealed=False) for name, (file, read) in plain.items()),
        *_commands(folder / "commands"),
    ]  # fmt: skip


def _command(*words: str | Path) -> None:
    from torchbayes.cli import app

    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        app([str(word) for word in words], standalone_mode=False)


def _commands(folder: Path) -> list[Format]:
    """Make a run and a comparison, and name the commands that read each of their files."""
    run, compared = folder / "run", folder / "comparison"
    small = ("--data", "moons", "--batch-size", "500", "--samples", "3")
    train = ("train", *small, "--method", "sgld", "--epochs", "12", "--set", "samples=12",
             "--set", "chains=2", "--out", run)  # fmt: skip
    compare = ("compare", *small, "--methods", "map,mle", "--epochs", "1", "--out", compared)
    for words in (train, compare, ("calibrate", run)):
        _command(*words)
    again: dict[Path, list[tuple[str | Path, ...]]] = {
        run / "config.toml": [("evaluate", run), ("report", run), ("diagnose", run)],
        run / "scores.json": [("report", run)],
        run / "metrics.jsonl": [("evaluate", run), ("report", run)],
        run / "traces.jsonl": [("diagnose", run)],
        run / "inputs.json": [("evaluate", run)],
        run / "likelihood.safetensors": [("evaluate", run)],
        run / "posterior.safetensors": [("evaluate", run), ("diagnose", run)],
        run / "calibration.json": [("report", run)],
        run / "cost.json": [("evaluate", run)],
        compared / "results.json": [("report", compared)],
        compared / "runs" / "map-0" / "scores.json": [(*compare, "--resume")],
        compared / "runs" / "map-0" / "config.toml": [(*compare, "--resume")],
    }
    return [
        Format(
            f"{words[0]}: {file.name}", file, partial(_command, *words), sealed=False, command=True
        )
        for file, commands in again.items()
        for words in commands
    ]


def _results(run: RunFolder) -> dict[str, Any]:
    scores = {"accuracy": 0.9, "nll": 0.3, "ece": 0.02, "seconds": 1.0}
    entry = {
        **scores,
        "runs": [{"seed": 0, "folder": "runs/map-0", **scores}],
        "summary": "one",
        "paper": "p",
    }
    return {
        "torchbayes": "0.1.0", "data": "moons", "model": "mlp", "classes": ["a", "b"], "ood": "far points",
        "settings": {"epochs": 3}, "notes": ["n"], "failed": {}, "methods": {"map": entry, "sgld": entry},
    }  # fmt: skip


_PAGE: dict[str, dict[str, Any]] = {
    "about.json": {"classes": ["a", "b"], "ood": "far points", "notes": ["a note"]},
    "draws.json": {"rows": [{"draws": n, "nll": 0.3 + 0.1 / n, "accuracy": 0.9} for n in (1, 2, 4)]},
    "corruptions.json": {
        "note": "noise", "examples": 40, "draws": 4, "clean": {"accuracy": 0.9, "nll": 0.3, "ece": 0.02},
        "kinds": {"noise": [{"severity": s, "accuracy": 0.8, "nll": 0.5, "ece": 0.1} for s in (1, 3, 5)]},
    },
    "diagnosis.json": {"chains": 2, "draws": 4, "predictions": {"rhat_median": 1.01, "rhat_worst": 1.2}},
}  # fmt: skip


def _page_files(folder: Path, run: RunFolder) -> Path:
    """Write the files of one run that its page shows."""
    folder.mkdir()
    shutil.copy(run.config_file, folder)
    shutil.copy(run.metrics_file, folder)
    scores = {"accuracy": 0.9, "nll": 0.3, "ece": 0.02, "seconds": 1.0}
    tables = {**_PAGE, "scores.json": scores, "cost.json": {"peak_memory": 123456}}
    for name, table in tables.items():
        write_json(folder / name, table)
    return folder


_YACHT = {
    "data.txt": "".join(f"{i} {i % 3} {i * i % 7}.5\n" for i in range(20)),
    "index_features.txt": "0\n1\n",
    "index_target.txt": "2\n",
    "index_train_0.txt": "".join(f"{i}\n" for i in range(15)),
    "index_test_0.txt": "".join(f"{i}\n" for i in range(15, 20)),
}


def _data_files(folder: Path) -> None:
    from PIL import Image
    from scipy.io import savemat

    (folder / "uci" / "yacht").mkdir(parents=True)
    for name, text in _YACHT.items():
        (folder / "uci" / "yacht" / name).write_text(text)
    digits = {"X": np.ones((32, 32, 3, 4), np.uint8), "y": np.arange(1, 5, dtype=np.uint8)[:, None]}
    savemat(folder / "svhn.mat", digits, do_compression=True)

    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (5, 4, 4), dtype=np.uint8)
    with gzip.open(folder / "digits.gz", "wb") as file:
        file.write(struct.pack(">BBBBIII", 0, 0, 8, 3, 5, 4, 4) + pixels.tobytes())
    rows = draw.integers(0, 256, (6, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    (folder / "cifar.bin").write_bytes(rows.tobytes())
    Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(folder / "image.png")
    (folder / "recipe.toml").write_text(
        'title = "t"\ndata = "moons"\nmodel = "mlp"\nmethod = "map"\nepochs = 3\nbatch_size = 64\n'
        "[model_options]\nhidden = [8, 8]\n[options]\nlr = 0.01\n[cpu]\nepochs = 1\n"
    )


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """Return the content with one random fault."""
    place, length = draw.randrange(len(raw)), draw.choice([1, 1, 2, 8, 64, 512])
    kind = draw.choice(
        ["bit", "bit", "byte", "cut", "zeros", "removed", "added", "doubled", "digit"]
    )
    end = place + length
    if kind == "bit":
        return raw[:place] + bytes([raw[place] ^ (1 << draw.randrange(8))]) + raw[place + 1 :]
    if kind == "byte":
        return raw[:place] + draw.randbytes(1) + raw[place + 1 :]
    if kind == "cut":
        return raw[:place]
    if kind == "zeros":
        return raw[:place] + bytes(len(raw[place:end])) + raw[end:]
    if kind == "removed":
        return raw[:place] + raw[end:]
    if kind == "added":
        return raw[:place] + draw.randbytes(length) + raw[place:]
    if kind == "doubled":
        return raw[:end] + raw[place:]
    digits = [i for i, byte in enumerate(raw) if 48 <= byte <= 57]
    at = draw.choice(digits or [place])
    return raw[:at] + str(draw.randrange(10)).encode() + raw[at + 1 :]


def _altered(value: Any, draw: random.Random) -> Any:
    """Return a table or list in which one entry is missing or of another type or size."""
    value = copy.deepcopy(value)
    inside = value
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            return value
        key = draw.choice(keys)
        below = inside[key]
        if isinstance(below, (dict, list)) and below and draw.random() < 0.7:
            inside = below
            continue
        odd: list[Any] = [
            None, -1, 2**62, 1e308, float("nan"), "", "x" * 300, [], {}, [[[[]]]], True, {"a": {"b": []}},
        ]  # fmt: skip
        if draw.random() < 0.3:
            del inside[key]
        else:
            inside[key] = draw.choice(odd)
        return value


def forged(one: Format, raw: bytes, draw: random.Random) -> bytes | None:
    """Return the content with an entry of another kind and a valid checksum, or None if it has no entries."""
    suffix = one.file.suffix
    try:
        if suffix == ".json":
            table = _altered({k: v for k, v in json.loads(raw).items() if k != "crc32"}, draw)
            return json.dumps({**table, "crc32": json_checksum(table)}).encode()
        if suffix == ".jsonl":
            lines = raw.decode().splitlines()
            at = draw.randrange(len(lines))
            row = _altered({k: v for k, v in json.loads(lines[at]).items() if k != "crc32"}, draw)
            lines[at] = json_line(row)
            return "\n".join([*lines, ""]).encode()
        if suffix == ".toml":
            text = tomli_w.dumps(_without_none(_altered(tomllib.loads(raw.decode()), draw)))
            return (toml_text(text) if one.sealed else text).encode()
        if suffix == ".safetensors":
            return _forged_tensors(raw, draw)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None  # what has become of it cannot be written
    return None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value if v is not None] if isinstance(value, list) else value


def _forged_tensors(raw: bytes, draw: random.Random) -> bytes | None:
    length = struct.unpack("<Q", raw[:8])[0]
    entries, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if draw.random() < 0.5 or "__metadata__" not in entries:
        entries = _altered(entries, draw)
    else:
        header = json.loads(entries["__metadata__"]["torchbayes"])
        header = _altered({k: v for k, v in header.items() if k != "crc32"}, draw)
        header["crc32"] = checksum(header, load(raw))
        entries["__metadata__"]["torchbayes"] = json.dumps(header)
    front = json.dumps(entries).encode()
    return struct.pack("<Q", len(front)) + front + data


def verdict(one: Format, sound: Any, forged: bool = False) -> str:
    """Read a file and say what came of it."""
    expected: tuple[type[Exception], ...] = (FileError, DataError)
    if forged or not one.sealed:
        expected = (ValueError,)
    try:
        found = one.read()
    except expected as error:
        return "clean" if "\n" not in str(error) and len(str(error)) < 900 else "long message"
    except MemoryError:
        return "out of memory"
    except Exception as error:
        return f"raw {type(error).__name__}: {str(error)[:120]}"
    if isinstance(sound, dict) and isinstance(found, dict):
        # A checksum whose name was hit is one more entry.
        found = {key: found.get(key) for key in sound}
    if same(found, sound):
        return "unchanged"
    return "SILENT" if one.sealed and not forged else "read"


def rounds(folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Damage files in turns, for ever; yield format and verdict."""
    draw = random.Random(f"damage {seed}")
    made = [(one, one.file.read_bytes(), one.read()) for one in formats(folder)]
    while True:
        for one, raw, sound in made:
            if one.command and draw.random() > _COMMANDS:
                continue
            share = 0.8 if one.command else _FORGED  # readers find the blind damage
            knowing = forged(one, raw, draw) if draw.random() < share else None
            content = damaged(raw, draw) if knowing is None else knowing
            one.file.write_bytes(content)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with _little_memory():
                said = verdict(one, sound, knowing is not None)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            one.file.write_bytes(raw)
            if grown > 1 << 19:  # kilobytes
                said = f"took {grown >> 10} MB: {said}"
            if said not in ("clean", "unchanged", "read"):
                said = f"{said} [{content[:4000].hex()}]"
            yield one.name, said


class _little_memory:
    """Limits what may be taken inside the block to 2 GB more than there is."""

    def __enter__(self) -> None:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * 4096 + _MEMORY
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)
