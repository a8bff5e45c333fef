"""What a figure was measured with: the code, its versions and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchbayes._version import __version__

__all__ = ["commit", "provenance"]


def provenance() -> dict[str, Any]:
    """Say what a figure was measured with: `commit`, `versions` and `machine`."""
    return {
        "commit": commit(),
        "versions": {
            "torchbayes": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
    }


@cache
def commit() -> str:
    """Look up the checkout's commit; an installed package has none."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
    except OSError:  # no git
        return ""
    return f"{found}+" if found and changed else found


def _processor() -> str:
    """Look up the processor's name, where the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
