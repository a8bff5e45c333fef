"""Time and peak memory of a Laplace posterior against laplace-torch with its default back end.

The networks are those of steps.py. Both libraries take turns (A, B, A, B, …) on the same network and data;
ratios are of medians of processor time, with quartiles. Peak memory is that of a process of its own, above
what the process has before the pass, the median of three, or of two rounds. Where laplace-torch refuses a
network or needs too much memory, its column says so. For a diagonal it holds a Jacobian for every example of
a batch, so that larger networks have smaller batches there, the same for both libraries, which each row says
(`batch_size`).

    pip install --no-deps -r tests/laplace/peer.txt
    python benchmarks/laplace_posterior.py [--network mlp] [--structure diagonal] [--rounds 5] [--json FILE]

With --json the rows are added to what FILE has (results/laplace.json).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import NETWORKS as STEPS
from timing import interleaved, progress, ratios
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.core.storage import write_json
from torchbayes.experiments.provenance import provenance
from torchbayes.models import resnet20

# Beside those of steps.py a small one with batch norm, which laplace-torch refuses.
NETWORKS = {**STEPS, "resnet20-norm": (lambda _: resnet20(), 64, (3, 32, 32))}
STRUCTURES = {"diagonal": "diag", "kronecker": "kron"}
OURS, PEER = "torchbayes", "laplace-torch"
BATCH = {"mlp": 128, "lenet5": 128, "resnet20": 32, "resnet20-norm": 32, "resnet18": 8}
# For a diagonal laplace-torch holds examples × classes × weights several times over, and its memory grows
# with the square of the batch: smaller ones keep it below 16 GB.
DIAGONAL_BATCH = {"mlp": 32, "resnet20": 8, "resnet20-norm": 8, "resnet18": 2}
# So that a pass, not the eigenvalues after it, is most of a Kronecker posterior; a diagonal one is all pass.
BATCHES = {"mlp": 32, "lenet5": 16, "resnet20": 4, "resnet20-norm": 4, "resnet18": 2}


def batch_size(network: str, structure: str) -> int:
    """Return the examples per batch of a row."""
    own = DIAGONAL_BATCH if structure == "diagonal" else {}
    return own.get(network, BATCH[network])


def make(network: str, structure: str, batches: int) -> tuple[nn.Module, Tensor, Tensor, int]:
    """Return a network, data of some batches, and the batch size."""
    torch.manual_seed(0)
    if network == "tiny":
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 10)), torch.randn(8, 4), \
            torch.randint(10, (8,)), 8  # fmt: skip
    build, _, shape = NETWORKS[network]
    net, size = build(1200).eval(), batch_size(network, structure)
    count = size * batches
    return net, torch.randn(count, *shape), torch.randint(10, (count,)), size


def job(library: str, network: str, structure: str, batches: int) -> Callable[[], Any]:
    """Return a function that fits a Laplace posterior over all weights, ready to predict."""
    net, x, y, size = make(network, structure, batches)
    if library == OURS:
        assert tb.Laplace  # imported on first use, which is not to be measured

        def ours() -> None:
            # Without the check that it is trained, which takes 256 examples, however many there are.
            tb.Laplace(net, (x, y), structure=structure, batch_size=size, check=False)

        return ours
    import laplace

    loader = DataLoader(TensorDataset(x, y), size)

    def theirs() -> None:
        la = laplace.Laplace(
            net, "classification", subset_of_weights="all", hessian_structure=STRUCTURES[structure]
        )
        la.fit(loader)

    return theirs


def memory(library: str, network: str, structure: str) -> float | str:
    """Measure the peak memory of one pass in a process of its own, in MB above the start."""
    command = [sys.executable, __file__, "--alone", library, network, structure]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["killed"]
        return f"refused: {lines[-1][:120]}"
    return float(done.stdout.split()[-1])


def middle(values: list[Any]) -> Any:
    """Return the median, or why there is none."""
    refused = [value for value in values if isinstance(value, str)]
    return refused[0] if refused else sorted(values)[len(values) // 2]


def status(field: str) -> int:
    """Read a number of kB from this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def alone(library: str, network: str, structure: str) -> None:
    """Print the peak memory of one pass, in MB above the start."""
    run = job(library, network, structure, 1)
    job(library, "tiny", structure, 1)()  # what is imported and built on first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    run()
    print((status("VmHWM") - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--structure", choices=STRUCTURES, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", nargs=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone:
        alone(*args.alone)
        return
    record: dict[str, Any] = {"rows": {}}
    if args.json is not None and args.json.exists():
        record = json.loads(args.json.read_text(encoding="utf-8"))
    for network in args.network or NETWORKS:
        for structure in args.structure or STRUCTURES:
            tries = [
                {lib: memory(lib, network, structure) for lib in (OURS, PEER)}
                for _ in range(min(3, args.rounds))
            ]
            used = {lib: middle([each[lib] for each in tries]) for lib in (OURS, PEER)}
            row: dict[str, Any] = {"memory_mb": used}
            batches = 1 if structure == "diagonal" else BATCHES[network]
            jobs = {
                lib: job(lib, network, structure, batches)
                for lib, each in used.items()
                if not isinstance(each, str)
            }
            seconds = interleaved(jobs, rounds=args.rounds, warmup=1, clock=time.process_time)
            if PEER in jobs:
                row["time"] = ratios(seconds, PEER)[OURS]
                row["memory"] = used[OURS] / used[PEER]
            row["seconds"] = {lib: sorted(s)[len(s) // 2] for lib, s in seconds.items()}
            row |= {"rounds": args.rounds, "batch_size": batch_size(network, structure)}
            record["rows"][f"{network} {structure}"] = row
            progress(f"{network} {structure} {json.dumps(row)}")
            if args.json is not None:
                write_json(args.json, {**record, **provenance()})


if __name__ == "__main__":
    main()
