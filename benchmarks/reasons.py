"""Why a peer is faster than torchbayes, where it is: the page says it in the rows whose figures need it."""

from __future__ import annotations

from typing import Any

# By peer, or by peer and network. What is said here must have been looked into.
REASONS: dict[str | tuple[str, str], str] = {
    ("torch.func", "resnet18"): "normalises every image by itself: another network",
    ("BackPACK", "resnet18"): "batch norm's statistics are constants to it: less to differentiate",
    ("Opacus", "resnet18"): "group norm in place of batch norm: another network",
}
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
