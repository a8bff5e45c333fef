"""Imports point one way (DESIGN): algorithms know nothing of training, models and metrics of anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "torchbayes"

# What a part of the library may import from it. What is not here may import everything.
CORE = {"_version", "core", "kernels", "posterior", "prior"}
ALLOWED: dict[str, set[str]] = {
    "models": {"models"},
    "metrics": {"metrics"},
    "data": {"core", "data"},
    "core": {"_version", "core", "kernels"},
    "kernels": {"kernels"},
    "posterior": CORE,
    "prior": CORE,
    "curvature": CORE | {"curvature"},
    "optim": CORE | {"optim", "curvature"},
    "average": CORE | {"average", "predict", "variational"},
    "variational": CORE | {"variational"},
    "likelihood": {"predict"},
    # metrics are pure functions of tensors: a prediction's density and quantiles are theirs.
    "predict": CORE | {"likelihood", "metrics", "predict"},
    "posthoc": {"posthoc", "predict"},
    "train": CORE
    | {"train", "optim", "average", "variational", "curvature", "likelihood", "predict", "data"},
}


def imports(file: Path) -> set[str]:
    """The parts of torchbayes that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("torchbayes")
        ):
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(file.relative_to(SOURCE).parts[0].removesuffix(".py"))
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "torchbayes" and len(parts) > 1}
    return found


@pytest.mark.parametrize("part", list(ALLOWED))
def test_imports_point_one_way(part: str) -> None:
    allowed = ALLOWED[part]
    folder = SOURCE / part
    for file in folder.rglob("*.py") if folder.is_dir() else [SOURCE / f"{part}.py"]:
        extra = imports(file) - allowed
        assert not extra, f"{file.name} imports {sorted(extra)}"


def test_only_one_file_imports_torch_distributed() -> None:
    users = [
        file.name
        for file in SOURCE.rglob("*.py")
        if "import torch.distributed"
        in file.read_text(encoding="utf-8").replace("torch.distributions", "")
        or "from torch.distributed" in file.read_text(encoding="utf-8")
    ]
    assert users == ["distributed.py"]
