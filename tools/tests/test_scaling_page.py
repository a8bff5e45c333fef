"""docs/scaling.md from figures that are easy to check by hand."""

from __future__ import annotations

from typing import Any

from tools.records.scaling import scaling_page


def row(sent: float, messages: float) -> dict[str, Any]:
    return {
        "weights": 1_000_000, "kept": 20.0, "checkpoint": 12.0, "sent": sent, "messages": messages,
    }  # fmt: skip


def stored(last: float) -> dict[str, Any]:
    return {
        "scaling": {
            "methods": {
                "vogn": {"ranks": {"2": row(8.0, 3), "1024": row(last, 3)}},
                "map": {"ranks": {"2": row(4.0, 2), "1024": row(4.0, 2)}},
            },
            "worked": {"ResNet-18": {"ranks": 128, "rows": {"vogn": row(8.0, 3)}}},
        }
    }


def test_the_page_has_the_figures_and_what_a_ring_sends_of_them() -> None:
    page = scaling_page(stored(8.0))
    assert "the same with 2 and 1,024 processes" in page
    assert page.index("| `map` | 20.0 | 12.0 | 4.0 | 2 |") < page.index(
        "| `vogn` | 20.0 | 12.0 | 8.0 "
    )
    # 8 MB in a ring of 128: 2 · 127/128 · 8 = 15.9
    assert "| ResNet-18 | 128 | 1.0 million | `vogn` | 20 MB | 16 MB | 3 |" in page


def test_a_size_that_depends_on_the_number_of_processes_is_said() -> None:
    assert "differ with the number of processes; the table has those of 2." in scaling_page(
        stored(9.0)
    )
