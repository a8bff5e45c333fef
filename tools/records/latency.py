"""The section of docs/benchmarks.md on how long an answer takes, from results/latency.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["latency_section"]

TEXT = """
## Answers

{machine}. How long an answer with 32 draws takes (`benchmarks/latency.py`), relative to what stands in the
second column: as many networks with weights of their own, one after another; one pass through the network;
or as many passes through one network, whose weights stay in the cache. `tb.Predictor` has drawn before,
`tb.predictive` draws anew, with `local=True` a layer's outputs in place of its weights where that is less
work. With a Bayesian last layer what comes before it runs once. **Bold** meets its target.

| | relative to | network | `Predictor` | `predictive` | `local=True` |
| --- | --- | --- | ---: | ---: | ---: |
"""
MORE = "\nOne input and 32 draws of {network} take `Predictor` {more:.1f} ms more than one pass.\n"
SNAPSHOTS = """
{count} snapshots of {network} ({whole:.0f} MB) with a frozen body, of which only the last layer varies, hold
{held:.2f} MB; taking them makes the process {process:.1f} MB larger, and their file has {file:.2f} MB.
"""
NETWORKS = {
    "mlp": "MLP 784-1200-1200-10",
    "lenet5": "LeNet-5",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50 at 224×224",
}
JOBS = ("Predictor", "predictive", "predictive, local")
BASELINES = {"networks": "32 networks", "one pass": "one pass", "as many passes": "32 passes"}


def latency_section(stored: Mapping[str, Any], machine: str) -> str:
    """Write the section as Markdown.

    Args:
        stored: What benchmarks/latency.py has written.
        machine: What it was measured with.
    """
    lines = []
    for part, networks in stored["parts"].items():
        for name, found in networks.items():
            cells = [_cell(found["rows"].get(job)) for job in JOBS]
            row = [part, BASELINES[found["to"]], NETWORKS[name], *cells]
            lines.append("| " + " | ".join(row) + " |\n")
    text = TEXT.format(machine=machine) + "".join(lines)
    small = stored["parts"].get("one input", {}).get("lenet5", {})
    if "more_ms" in small:
        text += MORE.format(network=NETWORKS["lenet5"], more=small["more_ms"])
    for name, found in stored.get("snapshots", {}).items():
        sizes = found["megabytes"]
        text += SNAPSHOTS.format(
            count=found["count"], network=NETWORKS[name].split(" at ")[0], whole=sizes["network"],
            held=sizes["held"], process=sizes["process"], file=sizes["file"],
        )  # fmt: skip
    return text


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    figure = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    if "target" not in row:
        return figure
    met = row["ratio"] <= row["target"]
    return f"**{figure}** ≤ {row['target']}" if met else f"{figure}, target {row['target']}"
