"""docs/scaling.md, from results/scaling.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_scaling", "scaling_page"]

HEAD = """# Many processes, on paper

Under `torchrun`, methods with one set of weights share every batch: each process goes through its part of
it, and they sum up what the update needs, weighted by examples. Samplers and ensembles train chains and
members of their own in every process and exchange nothing until the end.

## What a step sends, and what stays in memory

Bytes per weight of the network, in single precision, weights and gradients included. *Kept* is what is
alive between two steps, *saved* what a checkpoint holds, *summed* what a process hands to
`torch.distributed` in a step; a ring sends
2(R − 1)/R of it from each of R processes. Measured by `python benchmarks/scaling.py` on a network with
{weights:,} weights: the steps are those of `fit`, in torch's fake process group, with every process on a
machine of its own. Messages and their sizes are real there, time is not.

{same}

| method | kept | saved | summed | messages |
| --- | ---: | ---: | ---: | ---: |
"""
SAME = "Summed bytes and messages per process are the same with {ranks} processes."
DIFFER = (
    "Summed bytes and messages differ with the number of processes; the table has those of {first}."
)
MORE = """
Two messages are of a few numbers: how many examples each process had and which weights it has used, and
whether one of them is to save or to stop. The others are the statistics, in messages of up to 1 MB, or of
one tensor that is larger. On the CPUs of one machine they are not sent at all: every process writes them
into memory that all see, sums up its share and reads the others' sums, with four messages of a few numbers.
[Benchmarks](benchmarks.md) has the time of two processes on one machine, as far as it was measured.
"""
WORKED = """
## Worked examples

*Sent* is what a process sends in a step, in a ring; the images have 64×64 pixels here.
ResNet-18 on 128 GPUs is the VOGN paper's set-up for
ImageNet; the network with LoRA is one of seven billion weights (32 layers of width 4,096, adapters of
rank 16 for queries and values): the frozen weights are in every process and are neither drawn nor sent.

| network | processes | trained weights | method | kept | sent per step | messages |
| --- | ---: | ---: | --- | ---: | ---: | ---: |
"""


def read_scaling(results: Path) -> dict[str, Any]:
    """Read the file, if it exists, by its stem."""
    file = results / "scaling.json"
    return {file.stem: json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else {}


def scaling_page(stored: Mapping[str, Any]) -> str:
    """Write the page as Markdown.

    Args:
        stored: What `read_scaling` gave.
    """
    methods = stored["scaling"]["methods"]
    rows = {name: next(iter(found["ranks"].values())) for name, found in methods.items()}
    ranks = list(next(iter(methods.values()))["ranks"])
    alike = all(
        (row["sent"], row["messages"]) == (rows[name]["sent"], rows[name]["messages"])
        for name, found in methods.items()
        for row in found["ranks"].values()
    )
    said = [f"{int(rank):,}" for rank in ranks]
    same = (
        SAME.format(ranks=f"{', '.join(said[:-1])} and {said[-1]}")
        if alike
        else DIFFER.format(first=said[0])
    )
    text = HEAD.format(weights=rows["map"]["weights"], same=same)
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["sent"], item[0])):
        text += (
            f"| `{name}` | {row['kept']:.1f} | {row['checkpoint']:.1f} | {row['sent']:.1f} "
            f"| {row['messages']:g} |\n"
        )
    text += MORE + (WORKED if stored["scaling"]["worked"] else "")
    for network, found in stored["scaling"]["worked"].items():
        for name, row in found["rows"].items():
            count, weights = found["ranks"], row["weights"]
            sent = row["sent"] * weights * 2 * (count - 1) / count
            text += (
                f"| {network} | {count} | {weights / 1e6:.1f} million | `{name}` "
                f"| {row['kept'] * weights / 1e6:,.0f} MB | {sent / 1e6:,.0f} MB | {row['messages']:g} |\n"
            )
    return text
