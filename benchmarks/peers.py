"""Every peer's step and prediction beside ours and plain torch, on the same network and batch.

The three take turns in one process, so that peer / ours is of one run. Figures are relative to plain Adam
(samplers and the hypernetwork: plain SGD). A peer that cannot be imported or cannot take a network gives a
row that says why. `adapters.py` has what each of them does; its losses are kept: that of a first and that of
a last step on one batch, which should have fallen.

    make bench-peers     or, where the peers are installed:
    python benchmarks/peers.py [--network mlp] [--peer BLiTZ] [--seconds 3] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from adapters import PEERS, Peer
from steps import (
    NETWORKS,
    PREDICTIONS,
    VARIANTS,
    baseline,
    posterior_of,
    prediction_jobs,
    problem,
    read,
    step_of,
    why,
    write,
)
from timing import budgeted, progress, ratios

from torchbayes.experiments.provenance import provenance
from torchbayes.train.registry import METHODS

LEAST = {"mlp": 8, "lenet5": 8, "resnet20": 5, "resnet18": 3}
PREDICTING = (
    "mlp",
    "lenet5",
)  # a forward pass of the others takes so long that nothing else counts


def compare(network: str, name: str, seconds: float) -> dict[str, Any]:
    """Measure a peer on a network."""
    entry = PEERS[name]
    row: dict[str, Any] = {"package": entry.package, "method": entry.ours}
    row["commit"] = provenance()["commit"]  # rows are measured anew one at a time
    try:
        row["version"] = version(entry.package)
        peer = entry.make(*problem(network))
        if peer.note:
            row["note"] = peer.note
        losses: list[float] = []

        def step() -> None:
            losses.append(float(peer.step()))

        to = baseline(entry.ours)
        jobs = {"plain": step_of(network, to), "ours": step_of(network, entry.ours), "peer": step}
        times = budgeted(jobs, seconds, least=LEAST[network], most=30, warmup=1)
        found = ratios(times, "plain")
        row |= {"to": to, "ours": found["ours"], "peer": found["peer"]}
        row |= {"rounds": len(times["peer"]), "losses": [round(losses[0], 4), round(losses[-1], 4)]}
        if peer.predict is not None and network in PREDICTING:
            row["prediction"] = predictions(network, peer, VARIANTS[entry.ours][0], seconds)
    except PackageNotFoundError:
        row["error"] = f"{entry.package} is not installed"
    except Exception as error:  # whatever a peer does, the others go on
        row["error"] = why(error)
    return row


def predictions(network: str, peer: Peer, method: str, seconds: float) -> dict[str, Any]:
    """Measure a peer's and our prediction relative to as many plain forward passes."""
    make, _, shape = NETWORKS[network]
    draws, count = PREDICTIONS[network]
    model, inputs = make(1200).eval(), torch.randn(count, *shape)
    posterior = posterior_of(METHODS[method].posterior_kind, model, draws, shape)
    predict = peer.predict
    assert predict is not None
    jobs = prediction_jobs(model, posterior, inputs, draws)
    jobs["peer"] = lambda: predict(inputs, draws)
    found = ratios(budgeted(jobs, seconds, least=2, most=6, warmup=1), "plain")
    return {"draws": draws, "inputs": count, "ours": found["ours"], "peer": found["peer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--peer", choices=PEERS, action="append")
    parser.add_argument("--seconds", type=float, default=3, help="for three jobs, as rounds allow")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # the peers' own
    stored = read(arguments.json, {"networks": {}})
    for network in NETWORKS if arguments.network is None else arguments.network:
        rows = stored["networks"].setdefault(network, {})
        for name in PEERS if arguments.peer is None else arguments.peer:
            torch.manual_seed(0)
            row = rows[name] = compare(network, name, arguments.seconds)
            told = (
                row["error"]
                if "error" in row
                else f"{row['peer']['ratio']:.2f}, ours {row['ours']['ratio']:.2f} of {row['to']}"
            )
            progress(f"{network}: {name}: {told}")
            write(arguments.json, stored, arguments.threads)


if __name__ == "__main__":
    main()
