"""What the data folder leaves to those who use it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["torchbayes.data", "torchbayes.posthoc"])
def test_slow_libraries_are_imported_when_they_are_used(package: str) -> None:
    code = (
        f"import sys, {package}\n"
        "print(*(name for name in ('PIL', 'pooch', 'requests', 'scipy') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
