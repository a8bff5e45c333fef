"""Peak memory and stored numbers against sizes that are known."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

import torchbayes as tb
from torchbayes.experiments.cost import peak_memory, stored_numbers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is known on Linux only")
def test_peak_is_what_was_allocated_and_freed() -> None:
    size = 64 << 20
    for _ in range(2):  # the second time, freed memory must not hide what is taken again
        with peak_memory() as peak:
            block = torch.ones(size // 4)
            del block
            small = torch.ones(100)
        if peak.bytes is None:
            pytest.skip("this kernel does not let a process reset its peak")
        # The kernel's count lags behind by up to 64 pages a thread.
        assert size - (1 << 20) <= peak.bytes < size + (8 << 20)
        assert len(small) == 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is known on Linux only")
def test_pages_of_files_are_not_counted(tmp_path: Path) -> None:
    """The system loads them, as those of a library that is imported late."""
    file, size = tmp_path / "library", 64 << 20
    file.write_bytes(bytes(size))
    with file.open("rb") as content, peak_memory() as peak:
        pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        assert not any(pages[place] for place in range(0, size, 4096))
    pages.close()
    if peak.bytes is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert peak.bytes < 8 << 20


def test_numbers_of_a_posterior(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)  # 8 weights
    weights = tb.snapshot(model)
    tb.Point(weights).save(tmp_path / "point")
    assert stored_numbers(tmp_path / "point") == 8
    std = {name: torch.ones_like(t) for name, t in weights.items()}
    tb.Gaussian(weights, std).save(tmp_path / "gaussian")
    assert stored_numbers(tmp_path / "gaussian") == 16
    for folder in (None, tmp_path / "bank"):
        samples = tb.Samples(folder=folder)
        for _ in range(3):
            samples.append(weights)
        samples.save(tmp_path / "bank" if folder else tmp_path / "samples")
    assert stored_numbers(tmp_path / "samples") == 24
    assert stored_numbers(tmp_path / "bank") == 24
