"""Sections of docs/benchmarks.md on training: processes, memory formats, K-FAC, hypernetworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["hypernet_section", "kfac_section", "processes_section", "throughput_section"]

PROCESSES = """
## Two processes on two cores

{machine}. The time of a step with two processes and half the batch each, relative to one process with all of
it; one thread each, in turns (`python benchmarks/processes.py`). 0.5 would be perfect. **Bold** meets its
target.

| network | batch | method | time | processor time of one |
| --- | ---: | --- | ---: | ---: |
"""
THROUGHPUT = """
## Memory formats and bfloat16

{machine}. Processor time of a step of `fit(method="map")`, relative to the same without these arguments, in
turns (`python benchmarks/throughput.py`). *Choosing* is what `"auto"` spends once, in steps of plain `fit`.
[Throughput](throughput.md) explains the arguments.

| network, examples per update | `memory_format="auto"` | and `amp="bfloat16"` | choosing |
| --- | ---: | ---: | ---: |
"""
KFAC = """
## K-FAC on `resnet10t`

{machine}. Processor time of a step on timm's `resnet10t`, a mean over {cycles} cycles of ten steps in turns,
relative to Adam's median (`python benchmarks/kfac_step.py`); in brackets the median and the longest step.
**Bold** is at most {target:g}. The VOGN paper has 3.0 for K-FAC and 4.0 for Noisy K-FAC, with 32 images of
224×224 on each GPU. A step and a draw solve triangular systems of the weights' size, whatever the batch is:
with few, small images they are most of the step.

| | {cases} |
| --- |{rule}
"""
HYPERNET = """
## Hypernetworks

{machine}. Processor time of a step relative to plain SGD's (fused, with momentum) on the same network, in
turns (`python benchmarks/hypernet_step.py`). "Plain gradient" is the same hypernetwork under
`torch.optim.SGD`. Memory is the peak of three steps, as a multiple of the generators' weights.

| network, batch | `HypernetSGD` | plain gradient | memory | memory, plain gradient |
| --- | ---: | ---: | ---: | ---: |
"""
TARGET = 4.0
NAMES = {
    "mlp": "MLP 784-1200-1200-10",
    "lenet5": "LeNet-5",
    "resnet20": "ResNet-20",
    "resnetpp8": "resnetpp8, width 8",
    "wrn-16-2": "WRN-16-2",
    "wrn-16-4": "WRN-16-4",
    "wrn-28-4": "WRN-28-4",
}


def processes_section(stored: Mapping[str, Any], machine: str) -> str:
    """Write what benchmarks/processes.py has measured."""
    text = PROCESSES.format(machine=machine)
    for pair, row in stored["pairs"].items():
        network, method = pair.split()
        time = row["time"] | {"target": row["at_most"]}
        text += _line(
            NAMES[network], row["batch"], f"`{method}`", _cell(time), f"{row['processor']['ratio']:.2f}"
        )  # fmt: skip
    return text


def throughput_section(stored: Mapping[str, Any], machine: str) -> str:
    """Write what benchmarks/throughput.py has measured."""
    text = THROUGHPUT.format(machine=machine)
    for name, found in stored["networks"].items():
        auto, both = found["ratios"]["auto"], found["ratios"]["auto, bfloat16"]
        title = f"{NAMES[name]}, {found['batch']}"
        text += _line(title, _cell(auto), _cell(both), f"{auto['choosing_in_steps']:.1f}")
    return text


def kfac_section(stored: Mapping[str, Any], machine: str) -> str:
    """Write what benchmarks/kfac_step.py has measured."""
    cases = stored["cases"]
    text = KFAC.format(
        machine=machine, target=TARGET, cases=" | ".join(cases), rule=" ---: |" * len(cases),
        cycles=" or ".join(dict.fromkeys(str(case["cycles"]) for case in cases.values())),
    )  # fmt: skip
    for name in dict.fromkeys(name for case in cases.values() for name in case["steps"]):
        cells = []
        for case in cases.values():
            row = case["steps"].get(name)
            cells.append("–" if row is None else _kfac_cell(row))
        text += _line(name, *cells)
    return text


def hypernet_section(stored: Mapping[str, Any], machine: str) -> str:
    """Write what benchmarks/hypernet_step.py has measured."""
    text = HYPERNET.format(machine=machine)
    for name, found in stored["networks"].items():
        ours, plain = (found["rows"][key] for key in ("HypernetSGD", "plain gradient"))
        title = f"{NAMES[name]}, {found['batch']}"
        text += _line(title, _cell(ours), _cell(plain), _memory(ours), _memory(plain))
    return text


def _line(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


def _against(figure: str, value: float, target: float | None) -> str:
    """Show whether a figure meets its target, if it has one."""
    if target is None:
        return figure
    return f"**{figure}** ≤ {target}" if value <= target else f"{figure}, target {target}"


def _cell(row: Mapping[str, Any]) -> str:
    figure = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    return _against(figure, row["ratio"], row.get("target"))


def _kfac_cell(row: Mapping[str, Any]) -> str:
    figure = f"{row['mean']:.2f} [{row['median']:.2f}, {row['longest']:.2f}]"
    return f"**{figure}**" if row["mean"] <= TARGET else figure


def _memory(row: Mapping[str, Any]) -> str:
    if "memory" not in row:
        return "–"
    figure = f"{row['memory']:.1f} × {row['generators_mb']} MB"
    return _against(figure, row["memory"], row.get("memory_target"))
