"""Folders as `torchbayes compare` writes them, with made-up but consistent predictions."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchbayes.experiments.saved_predictions import Predictions

CLASSES = 4
EXAMPLES = 160


def predictions(seed: int, *, skill: float = 2.0, draws: int = 8, ood: bool = True) -> Predictions:
    """Average the softmax of noisy logits; `skill` is how far the true class stands out."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(EXAMPLES) % CLASSES

    def predict(signal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = signal + torch.randn(signal.shape, generator=generator)
        noise = 0.7 * torch.randn((draws, *signal.shape), generator=generator) * (draws > 1)
        probs = torch.softmax(shared + noise, -1)
        return probs.mean(0), torch.special.entr(probs).sum(-1).mean(0)

    truth = skill * torch.nn.functional.one_hot(targets, CLASSES).float()
    probs, aleatoric = predict(truth)
    if not ood:
        return Predictions(probs, aleatoric, targets, draws=draws)
    foreign = predict(torch.zeros(EXAMPLES // 2, CLASSES))
    return Predictions(probs, aleatoric, targets, *foreign, draws=draws)


def write_folder(
    folder: Path,
    methods: dict[str, dict[str, Any]],
    *,
    seeds: tuple[int, ...] = (0,),
    epochs: int = 6,
    images: bool = True,
    classes: list[str] | None = None,
    extras: bool = False,
    same_noise: bool = False,
    **changes: Any,
) -> Path:
    """Write a comparison; `methods` gives the arguments of `predictions` for each, and `members`."""
    table: dict[str, Any] = {}
    for number, (name, arguments) in enumerate(methods.items()):
        members = arguments.pop("members", 1)
        runs = []
        for seed in seeds:
            made = predictions((0 if same_noise else 1000 * number) + seed, **arguments)
            run = folder / "runs" / f"{name}-{seed}"
            made.save(run / "predictions.npz")
            _write_history(run / "metrics.jsonl", epochs, members, seed)
            scores = {k: v if math.isfinite(v) else None for k, v in made.scores().items()}
            seconds = 2.0 * (number + 1) + seed
            scores |= {"seconds": seconds, "parameters": 1234.0, "stored": 1234.0 * (number + 1)}
            scores |= {"seconds_per_epoch": seconds / epochs, "peak_memory": 3e6 * (number + 1)}
            if extras:
                write_extras(run, made)
            runs.append({"seed": seed, "folder": f"runs/{name}-{seed}", **scores})
        table[name] = _summary(name, runs)
    if images:
        random = np.random.default_rng(0)
        np.savez_compressed(
            folder / "images.npz",
            test=random.integers(0, 256, (EXAMPLES // 2, 1, 6, 6), dtype=np.uint8),
            ood=random.random((EXAMPLES // 4, 3, 6, 6)),
        )
    results = {
        "torchbayes": "0.1.0",
        "created": "2026-11-16T03:46:02+00:00",
        "data": "digits",
        "model": "mlp",
        "classes": [f"class {i}" for i in range(CLASSES)] if classes is None else classes,
        "ood": "noise",
        "notes": ["made up for a test"],
        "settings": {"epochs": epochs, "batch_size": 64, "samples": 8, "seeds": list(seeds)},
        "methods": table,
        "failed": {},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def write_extras(run: Path, made: Predictions) -> None:
    """Write the files that `evaluate`, `calibrate` and other commands save in a run folder."""
    scores = made.scores()
    few = {key: scores[key] for key in ("accuracy", "nll", "ece")}
    courses = [{"draws": 2**i, **few, "nll": few["nll"] * (1 + 0.3 / 2**i)} for i in range(4)]
    _write_json(run / "draws.json", courses)
    kinds = {
        kind: [
            {"severity": s, **few, "accuracy": few["accuracy"] * (1 - 0.1 * s)} for s in range(1, 6)
        ]
        for kind in ("noise", "jpeg", "<i>new</i>")
    }
    note = "Corruptions are generated."
    _write_json(
        run / "corruptions.json", {"note": note, "examples": 160, "clean": few, "kinds": kinds}
    )
    after = {**few, "ece": few["ece"] / 2}
    calibration = {
        "fitted_on": "half of the test split",
        "scored_on": "the other half",
        "temperature": {"value": 1.5, "before": few, "after": after},
        "conformal": [
            {"target": target, "coverage": target + 0.012, "mean_size": 1.25, "empty": 0.0}
            for target in (0.8, 0.9, 0.95)
        ],
        "abstention": [
            {"target": 0.02, "coverage": 0.0, "risk": None, "threshold": None},
            {"target": 0.05, "coverage": 0.4, "risk": 0.031, "threshold": 0.9},
            {"target": 0.01, "coverage": 0.0, "risk": None, "threshold": None},
        ],
    }
    _write_json(run / "calibration.json", calibration)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_history(path: Path, epochs: int, members: int, seed: int) -> None:
    rows = []
    for step in range(epochs * members):
        epoch = step % epochs + 1
        loss = 2.0 * math.exp(-0.4 * epoch) + 0.01 * seed + 0.1
        rows.append(
            {
                "epoch": step + 1,
                "loss": loss,
                "nll": loss,
                "lr": 0.001,
                "seconds": 0.1 * step,
                "validation_nll": 1.1 * loss,
                "validation_accuracy": 1 - 0.3 * loss / 2,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    keys = [key for key in runs[0] if key not in ("seed", "folder")]
    columns = {key: [run[key] for run in runs] for key in keys}
    means = {k: None if None in v else statistics.fmean(v) for k, v in columns.items()}
    spread = {
        k: None if None in v or len(v) < 2 else statistics.stdev(v) for k, v in columns.items()
    }
    return {
        "summary": f"what {name} does",
        "paper": f"the paper of {name}",
        **means,
        "spread": spread,
        "runs": runs,
    }
