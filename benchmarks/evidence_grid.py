"""Does the evidence pick a good prior? Held-out NLL of the pick against the best of a grid, on seven tasks.

For each of 20 precisions δ from 10⁻² to 10² and each of three initialisations a network of 20 hidden units is
brought to its MAP with the prior N(0, 1/δ), in double precision: by L-BFGS for classes, until a step gains
less than 10⁻⁶ of the loss, and by at most 400 steps of Levenberg and Marquardt for regression, until one
gains less than 10⁻³ nats. Not by some epochs of Adam: a network that stopped early is not the MAP of its δ,
neither its evidence nor its NLL is then one of δ, and weak priors look better than they are. For regression
the noise is the one with the largest evidence at δ, and the weights are the MAP at that noise: both are found
in turns, as MacKay did.

The full Laplace posterior of a network has an evidence, from the training data alone, and a held-out NLL,
that of the linearised prediction, whose model the evidence is the evidence of. Beside it stands the NLL of
the network alone, which is what counts where the evidence only chooses a weight decay. All are averaged over
the initialisations. The pick is the δ with the largest evidence; what it loses against the δ with the best
NLL is in nats per example, and as a share of the latter's NLL in the units of the target, as tables of UCI
figures have it. Beside it: the pick of a Kronecker posterior.

This protocol was set on other data (Friedman's function), before it was run on these seven; the NLL of the
network alone was added afterwards, and changes no pick.

    python benchmarks/evidence_grid.py --uci FOLDER [--task yacht] [--json results/evidence-grid.json]

FOLDER has the UCI tables with Gal's files that name their columns. A task that FILE has is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_digits, make_moons
from timing import progress
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchbayes as tb
from torchbayes.core.storage import write_json
from torchbayes.experiments.provenance import provenance

GRID = torch.logspace(-2, 2, 20, dtype=torch.float64).tolist()
STARTS, STEPS, TURN, GAIN = 3, 400, 20, 1e-3
TABLES = {
    "yacht": "yacht", "energy": "energy", "concrete": "concrete", "wine": "wine-quality-red",
    "boston": "bostonHousing",
}  # fmt: skip
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def table(folder: Path) -> tuple[Data, float]:
    """Return a UCI table in two random halves, standardised by the first, and the target's scale.

    Gal's test sets are too small to tell 1 %.
    """
    data = np.loadtxt(folder / "data.txt")
    features, target = (
        np.loadtxt(folder / f"index_{name}.txt").astype(int) for name in ("features", "target")
    )
    order = np.random.default_rng(0).permutation(len(data))
    train, test = order[: len(data) // 2], order[len(data) // 2 :]
    parts = []
    for values in (data[:, features], data[:, target].reshape(-1, 1)):
        mean, std = values[train].mean(0), values[train].std(0)
        scaled = (values - mean) / np.where(std > 0, std, 1)
        parts += [torch.tensor(scaled[rows]) for rows in (train, test)]
    return (parts[0], parts[2], parts[1], parts[3]), float(std[0])


def digits() -> Data:
    """Return scikit-learn's digits, 1,000 to train on."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1000]], y[order[:1000]], x[order[1000:]], y[order[1000:]]


def moons() -> Data:
    """Return two moons with much noise."""
    x, y = make_moons(1200, noise=0.3, random_state=0)
    x, y = torch.tensor(x), torch.tensor(y)
    return x[:200], y[:200], x[200:], y[200:]


def classify(net: nn.Sequential, x: Tensor, y: Tensor, delta: float) -> tb.Categorical:
    """Bring a classifier to its MAP."""
    inputs, labels, (hidden, width) = x.numpy(), y.numpy(), net[0].weight.shape
    sizes = np.cumsum([hidden * width, hidden, net[2].weight.numel()])
    rows = np.arange(len(labels))

    def loss_and_gradient(vector: np.ndarray) -> tuple[float, np.ndarray]:
        # By hand, which takes a fifth of autograd's time for so small a network.
        into, bias, out, offset = np.split(vector, sizes)
        into, out = into.reshape(hidden, width), out.reshape(-1, hidden)
        units = np.tanh(inputs @ into.T + bias)
        logits = units @ out.T + offset
        logits -= logits.max(1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        loss = -log_probs[rows, labels].sum() + 0.5 * delta * vector @ vector
        errors = np.exp(log_probs)
        errors[rows, labels] -= 1
        inner = errors @ out * (1 - units**2)
        parts = (inner.T @ inputs, inner.sum(0), errors.T @ units, errors.sum(0))
        return float(loss), np.concatenate([part.ravel() for part in parts]) + delta * vector

    start = parameters_to_vector(net.parameters()).detach().numpy()
    options = {"maxiter": 3000, "maxfun": 4000, "maxcor": 30, "ftol": 1e-6, "gtol": 1e-4}
    found = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    vector_to_parameters(torch.from_numpy(found.x), net.parameters())
    return tb.Categorical()


def regress(net: nn.Module, x: Tensor, y: Tensor, delta: float) -> tb.GaussianNoise:
    """Bring a regression to its MAP at the noise that has the largest evidence there."""
    names = [name for name, _ in net.named_parameters()]
    sizes = [w.shape for w in net.parameters()]

    def outputs(vector: Tensor, inputs: Tensor) -> Tensor:
        parts = vector.split([size.numel() for size in sizes])
        weights = {n: p.view(size) for n, p, size in zip(names, parts, sizes, strict=True)}
        return functional_call(net, weights, (inputs,)).squeeze(-1)

    jacobian = vmap(grad(outputs), (None, 0))
    vector, aims = parameters_to_vector(net.parameters()).detach(), y.squeeze(1)
    noise = 0.25  # σ²

    def cost(at: Tensor) -> float:
        errors = (aims - outputs(at, x)).square().sum()
        return float(errors / (2 * noise) + delta / 2 * at.square().sum())

    damping = 1.0
    for turn in range(STEPS // TURN):
        now, gain = cost(vector), math.inf
        for _ in range(TURN):
            jac = jacobian(vector, x)
            slope = jac.t() @ (aims - outputs(vector, x)) / noise - delta * vector
            curvature = jac.t() @ jac / noise
            while damping < 1e12:  # more of it until the step goes down
                matrix = curvature + (delta + damping) * torch.eye(len(vector))
                step = torch.cholesky_solve(slope[:, None], torch.linalg.cholesky(matrix))[:, 0]
                gain = now - cost(vector + step)
                if gain > 0:
                    break
                damping *= 4
            if gain > 0:
                vector, now = vector + step, now - gain
            damping = min(max(damping / 5, 1e-9), 1e6)
            if gain < GAIN:
                break
        jac, before = jacobian(vector, x), noise
        small = jac.t() @ jac if len(vector) < len(x) else jac @ jac.t()
        values = torch.linalg.eigvalsh(small).clamp_min(0)
        errors = float((aims - outputs(vector, x)).square().sum())
        for _ in range(200):  # MacKay: σ² = Σ errors² / (N − γ)
            noise = errors / (len(x) - float((values / (values + delta * noise)).sum()))
        if turn and gain < GAIN and abs(math.log(noise / before)) < 2e-3:
            break
    vector_to_parameters(vector, net.parameters())
    return tb.GaussianNoise(math.sqrt(noise))


def measure(data: Data, delta: float, seed: int) -> dict[str, float]:
    """Bring one network to its MAP; return the evidence and the held-out NLL."""
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    classes = not y.is_floating_point()
    count = int(y.max()) + 1 if classes else 1
    net = nn.Sequential(nn.Linear(x.shape[1], 20), nn.Tanh(), nn.Linear(20, count)).eval()
    likelihood = (classify if classes else regress)(net, x, y, delta)
    full, kronecker = (
        tb.Laplace(
            net, (x, y), likelihood, structure=structure, prior=delta, batch_size=512, check=False
        )
        for structure in ("full", "kronecker")
    )
    p = full.predictive(x_test, samples=500, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = float(likelihood.loss(net(x_test), y_test))
    noise = {} if classes else {"noise": float(likelihood.std)}
    return {
        "evidence": float(full.log_marginal_likelihood()),
        "kronecker_evidence": float(kronecker.log_marginal_likelihood()),
        "nll": -float(p.log_prob(y_test).mean()), "network_nll": alone, **noise,
    }  # fmt: skip


def judged(data: Data, unit: float) -> dict[str, Any]:
    """Return the means of every precision, the picks and the best; NLLs in the units of the target."""
    rows: list[dict[str, float]] = []
    for delta in GRID:
        found = [measure(data, delta, seed) for seed in range(STARTS)]
        row = {key: statistics.mean(each[key] for each in found) for key in found[0]}
        shifted = {key: row[key] + math.log(unit) for key in ("nll", "network_nll")}
        rows.append({"precision": delta, **row, **shifted})
        progress(f"  {rows[-1]}")
    other = max(rows, key=lambda row: row["kronecker_evidence"])
    return {"unit": unit, **compared(rows), "kronecker_pick": other, "grid": rows}


def compared(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the row with the largest evidence, the best rows, and what the pick loses against them."""
    pick = max(rows, key=lambda row: row["evidence"])
    found: dict[str, Any] = {"pick": pick}
    for key in ("nll", "network_nll"):
        best = min(rows, key=lambda row: row[key])
        lost = pick[key] - best[key]
        found[key] = {"best": best, "lost_nats": lost, "share": lost / abs(best[key])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, required=True)
    parser.add_argument("--task", action="append", choices=["digits", "moons", *TABLES])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    record: dict[str, Any] = {"tasks": {}}
    if args.json is not None and args.json.exists():
        record = json.loads(args.json.read_text(encoding="utf-8"))
    for name in args.task or ["yacht", "energy", "concrete", "moons", "boston", "digits", "wine"]:
        if name in record["tasks"]:
            continue
        data, unit = table(args.uci / TABLES[name]) if name in TABLES else (globals()[name](), 1.0)
        found = record["tasks"][name] = judged(data, unit)
        pick, other = found["pick"], found["kronecker_pick"]
        progress(
            f"{name}: evidence picks {pick['precision']:.3g}, Kronecker {other['precision']:.3g}"
        )
        for key in ("nll", "network_nll"):
            best, lost = found[key]["best"], found[key]["lost_nats"]
            progress(
                f"  {key} {pick[key]:.4f}, the best is {best['precision']:.3g} ({best[key]:.4f}): "
                f"{lost:.4f} nats, {found[key]['share']:.2%}; Kronecker {other[key]:.4f}"
            )
        if args.json is not None:
            write_json(args.json, {**record, **provenance()})


if __name__ == "__main__":
    main()
