"""The order of the methods, the few that a page shows at first, and their marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torchbayes.report.results import MethodResult

__all__ = ["RULE", "SHOWN", "ranked"]

SHOWN = 6
RULE = "map and ensemble for comparison, the method with the best NLL, and then the best posteriors by NLL"
"""Which methods a page shows at first, in words."""

_BASELINES = ("map", "ensemble")


def ranked(methods: Sequence[MethodResult]) -> tuple[MethodResult, ...]:
    """Sort methods by NLL, choose those to show at first and number their marks.

    Numbers begin with the methods shown at first, the baselines before the others, so that these differ most
    from each other and `map` looks the same on nearly every page.

    Args:
        methods: Methods in the requested order; those without an NLL stay in it, at the end.
    """
    order = sorted(methods, key=_nll)
    baselines = [m for name in _BASELINES for m in order if m.name == name]
    posteriors = [method for method in order if not method.point]
    wanted = list(dict.fromkeys([*baselines, *order[:1], *posteriors, *order]))
    marked = [*wanted[:SHOWN], *(method for method in order if method not in wanted[:SHOWN])]
    index = {method: number for number, method in enumerate(marked)}
    return tuple(replace(m, index=index[m], first=index[m] < SHOWN) for m in order)


def _nll(method: MethodResult) -> float:
    value = method.scores.get("nll")
    return math.inf if value is None else value
