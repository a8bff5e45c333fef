"""Damage files of every format at random and read them: a clean error or the old content, nothing else.

`python -m tests.campaigns.damage --minutes 10 --seed 1` prints a table; the tests run a small part.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchbayes as tb
from torchbayes.core.errors import FileError
from torchbayes.core.reading import read_json
from torchbayes.core.storage import write_json
from torchbayes.data import DataError, TableEncoding, load_data
from torchbayes.experiments.saved_predictions import Predictions
from torchbayes.train.checkpoint import read_state, write_state
from torchbayes.train.run_folder import RunFolder

from ..conformance.problems import blobs, small_net
from ..train.test_checkpoint import same

_MEMORY = 4 << 30


@dataclass(frozen=True)
class Format:
    """A file to be damaged.

    Attributes:
        name: Name in the table.
        file: The sound file.
        read: Reads it and returns its content.
    """

    name: str
    file: Path
    read: Callable[[], Any]


def formats(folder: Path) -> list[Format]:
    """Make one file of every format."""
    run = RunFolder(folder / "run")
    options = {"epochs": 3, "progress": False, "folder": run.path}
    tb.fit(small_net, blobs(), "sgld", sample_folder=str(folder / "bank"), samples=2, **options)
    run.checkpoint.previous.unlink()  # damage must be an error, not a return to the generation before
    tb.Point(tb.snapshot(small_net())).save(folder / "posterior.safetensors")
    write_json(
        folder / "scores.json", {"nll": 0.25, "runs": [{"seed": 0, "ece": 1e-3}], "note": "ε"}
    )
    probs = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    Predictions(probs, probs[:, 0], torch.arange(40) % 3).save(folder / "predictions.npz")
    averager = tb.SWA(small_net())
    averager.update()
    write_state(folder / "state.safetensors", averager.state_dict())
    part = RunFolder(folder / "part")
    tb.fit(small_net(), blobs(), params="2.*", folder=part.path, epochs=1, progress=False)
    (folder / "things.csv").write_text(
        "size,colour,price\n"
        + "".join(f"{i},{'red' if i % 3 else 'blue'},{i % 7}\n" for i in range(40))
    )
    encoding = load_data(f"table:{folder / 'things.csv'}").encoding
    assert encoding is not None
    encoding.save(run.table_file)
    whole = RunFolder(folder / "whole")
    kept = tb.fit(
        small_net, blobs(), "map", transform=tb.data.Normalise((0.0,) * 4, (2.0,) * 4), epochs=1,
        likelihood=tb.Categorical(class_weight=[1.0, 2.0, 3.0]), progress=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the temperature may make it worse
        kept.calibrate(blobs(100, 1))
    kept.save(whole.path)
    network = small_net()
    laplace = {"structure": "diagonal", "folder": folder, "check": False}
    tb.Laplace(network, blobs(), **laplace)

    def weights(path: Path) -> Callable[[], Any]:
        return lambda: [dict(w) for w in tb.load(path, small_net()).draws(2)]

    def frozen() -> Any:
        network = small_net()
        part.read_rest(network)
        return tb.snapshot(network, ["0.weight", "0.bias"])

    def calibration() -> Any:
        found = whole.read_calibration()
        return None if found is None else found.figures

    def predictions() -> Any:
        return vars(Predictions.load(folder / "predictions.npz"))

    return [
        Format("checkpoint.safetensors", run.checkpoint.newest, run.checkpoint.read),
        Format("state.safetensors", folder / "state.safetensors",
               lambda: read_state(folder / "state.safetensors")),
        Format("config.toml", run.config_file, run.read_config),
        Format("metrics.jsonl", run.metrics_file, run.read_metrics),
        Format("traces.jsonl", run.traces_file, run.read_traces),
        Format("posterior.safetensors", folder / "posterior.safetensors",
               weights(folder / "posterior.safetensors")),
        Format("rest.safetensors", part.rest_file, frozen),
        Format("likelihood.safetensors", whole.likelihood_file,
               lambda: dict(whole.read_likelihood().named_buffers())),
        Format("inputs.json", whole.inputs_file, lambda: vars(whole.read_preprocessing())),
        Format("calibration.json", whole.calibration_file, calibration),
        Format("laplace.safetensors", folder / "laplace.safetensors",
               lambda: tb.Laplace(network, blobs(), **laplace).posterior().std()),
        Format("table.json", run.table_file, lambda: vars(TableEncoding.load(run.table_file))),
        Format("bank.json", folder / "bank" / "bank.json", weights(folder / "bank")),
        Format("draw.safetensors", folder / "bank" / "draw-000001.safetensors", weights(folder / "bank")),
        Format("scores.json", folder / "scores.json", lambda: read_json(folder / "scores.json", "")),
        Format("predictions.npz", folder / "predictions.npz", predictions),
    ]  # fmt: skip


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


def verdict(one: Format, sound: Any) -> str:
    """Read a file and say what came of it."""
    try:
        found = one.read()
    except (FileError, DataError) as error:
        return "clean" if "\n" not in str(error) and len(str(error)) < 700 else "long message"
    except MemoryError:
        return "out of memory"
    except Exception as error:
        return f"raw {type(error).__name__}"
    if isinstance(sound, dict) and isinstance(found, dict):
        found = {
            key: found.get(key) for key in sound
        }  # a checksum whose name was hit is one more entry
    return "unchanged" if same(found, sound) else "SILENT"


def campaign(seconds: float, seed: int, most: int | None = None) -> dict[str, Counter[str]]:
    """Damage files as long as there is time, at most so many times each; count the verdicts."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    table: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        made = [(one, one.file.read_bytes(), one.read()) for one in formats(Path(name))]
        rounds = 0
        while time.monotonic() < end and (most is None or rounds < most):
            rounds += 1
            for one, raw, sound in made:
                one.file.write_bytes(damaged(raw, draw))
                table.setdefault(one.name, Counter())[verdict(one, sound)] += 1
                one.file.write_bytes(raw)
    return table


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    table = campaign(60 * arguments.minutes, arguments.seed)
    print(f"| file (seed {arguments.seed}) | damaged | clean error | unchanged | bad |")
    print("| --- | ---: | ---: | ---: | ---: |")
    faults = 0
    for name, counts in table.items():
        bad = {key: n for key, n in counts.items() if key not in ("clean", "unchanged")}
        faults += sum(bad.values())
        total = sum(counts.values())
        print(f"| {name} | {total} | {counts['clean']} | {counts['unchanged']} | {bad or 0} |")
    sys.exit(bool(faults))


if __name__ == "__main__":
    _main()
