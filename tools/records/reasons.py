"""Why a peer is faster than torchbayes, or a target is missed: the page says it where the figures need it."""

from __future__ import annotations

from typing import Any

# By peer, or by peer and network. What is said here must have been looked into.
REASONS: dict[str | tuple[str, str], str] = {
    ("torch.func", "resnet18"): "normalises every image by itself: another network",
    ("BackPACK", "resnet18"): "batch norm's statistics are constants to it: less to differentiate",
    ("Opacus", "resnet18"): "group norm in place of batch norm: another network",
}
# By method and network: what bounds a step that misses its target.
BOUNDS: dict[tuple[str, str], str] = {
    ("bbb", "lenet5"): (
        "62,000 weights are too few to share among threads: their draw and gradients, a tenth of the step, "
        "run on one; the rest is calls, and Adam on twice the weights"
    ),
    ("vogn", "resnet20"): (
        "the squares of every example's gradient: a batched product for each convolution, and copies that "
        "put its operands in order, 0.2 of Adam's step"
    ),
    ("hypernet", "mlp"): (
        "the generators' output layers have 32 weights for every weight of the network, 76 million; a step "
        "reads them for the draw, and them and their momentum for the update, and writes both: 1.5 GB. Since "
        "this row was measured, half of that, for hidden units that are off, is left for later: see "
        "docs/methods/hypernet.md"
    ),
}
NEAR = "the target lies within the quartiles of this measurement"
OVERLAP = "the quartiles overlap: no difference that this measurement can show"
UNKNOWN = "not known yet"


def reason(peer: str, network: str, row: dict[str, Any]) -> str:
    """Why ours is slower than a peer; empty if it is not.

    Args:
        peer: The peer's name.
        network: The network's.
        row: The figures `peer` and `ours`, each with `ratio`, `low` and `high`.
    """
    theirs, ours = row["peer"], row["ours"]
    if theirs["ratio"] >= ours["ratio"]:
        return ""
    if theirs["high"] >= ours["low"]:
        return OVERLAP
    return REASONS.get((peer, network), REASONS.get(peer, UNKNOWN))


def bound(method: str, network: str, row: dict[str, Any]) -> str:
    """Why a method misses its target on a network; empty if it does not.

    Args:
        method: The method's name.
        network: The network's.
        row: Its figures: `ratio`, `low`, `high` and perhaps `target`.
    """
    target = row.get("target")
    if target is None or "ratio" not in row or row["ratio"] <= target:
        return ""
    if row["low"] <= target:
        return NEAR
    return BOUNDS.get((method, network), UNKNOWN)
