"""Imports point one way (DESIGN): algorithms know nothing of training, models and metrics of anything."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchbayes as tb

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
    # A closed-form bound is one of a likelihood, and its prediction needs no draws.
    "variational": CORE | {"likelihood", "predict", "variational"},
    "likelihood": {"likelihood", "predict"},
    # metrics are pure functions of tensors: a prediction's density and quantiles are theirs.
    "predict": CORE | {"likelihood", "metrics", "predict"},
    "posthoc": {"metrics", "posthoc", "predict"},
    "serving": CORE | {"data", "likelihood", "posthoc", "predict", "serving", "train"},
    "laplace": CORE | {"laplace", "curvature", "likelihood", "predict"},
    "train": CORE
    | {"train", "optim", "average", "variational", "curvature", "likelihood", "predict", "data"}
    | {"laplace", "models", "posthoc"},
    "tuning": {"core", "data", "predict", "train", "tuning"},
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


def test_only_the_command_line_imports_the_integrations() -> None:
    users = {
        file.relative_to(SOURCE).parts[0]
        for file in SOURCE.rglob("*.py")
        if "integrations" in imports(file)
    }
    assert users <= {"cli", "integrations"}


def test_the_integrations_import_a_framework_when_it_is_asked_for() -> None:
    frameworks = {"accelerate", "huggingface_hub", "lightning", "mlflow", "skorch", "transformers"}
    found = modules_after("import torchbayes.integrations")
    assert "torchbayes.integrations.collector" in found
    assert not (frameworks | {"wandb"}) & found


def test_only_one_file_imports_torch_distributed() -> None:
    users = [
        file.name
        for file in SOURCE.rglob("*.py")
        if "import torch.distributed"
        in file.read_text(encoding="utf-8").replace("torch.distributions", "")
        or "from torch.distributed" in file.read_text(encoding="utf-8")
    ]
    assert users == ["distributed.py"]


def modules_after(*command: str) -> set[str]:
    """The modules that a Python process with these arguments has imported at its end."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: sys.stderr.write('|'.join(sys.modules)))\n"
        f"{'; '.join(command)}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return set(done.stderr.splitlines()[-1].split("|"))


HEAVY = {"torch", "numpy", "sklearn", "scipy", "matplotlib", "numba"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    found = modules_after("import torchbayes")
    assert "torchbayes" in found
    assert not HEAVY & found


@pytest.mark.parametrize(
    "words", ["--help", "--version", "trian", "train --help", "compare --lr 1", "train --epoch 3"]
)
def test_help_and_typing_errors_import_nothing_heavy(words: str) -> None:
    found = modules_after(
        f"sys.argv = ['torchbayes', *{words.split()}]",
        "runpy.run_module('torchbayes', run_name='__main__')",
    )
    assert "torchbayes.cli" in found
    assert not HEAVY & found


def test_names_at_the_top_are_few_and_resolve() -> None:
    assert len(tb.__all__) <= 64
    assert len(tb.__all__) == len(set(tb.__all__))
    assert set(tb.optim.__all__) <= set(tb.__all__) <= set(dir(tb))
    for name in tb.__all__:
        assert getattr(tb, name) is not None
    names: dict[str, object] = {}
    exec("from torchbayes import *", names)
    assert set(tb.__all__) <= set(names)


def test_namespaces_are_found_on_first_use() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torchbayes as tb; print(*(getattr(tb, n).__name__ for n in tb._NAMESPACES))",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == [f"torchbayes.{name}" for name in tb._NAMESPACES]
    assert {"average", "data", "metrics", "models", "optim", "variational"} <= set(tb._NAMESPACES)
    assert set(tb._NAMESPACES) <= set(dir(tb))


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name in ("nothing", "Nothing", "__nothing__"):
        with pytest.raises(AttributeError, match=name):
            getattr(tb, name)


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.name == "*" or alias.asname == alias.name
            seen[alias.name] = node.module or ""
    assert seen.pop("*") == "torchbayes.optim"
    homes = {name: f"torchbayes.{home}" for name, home in tb._HOMES.items()}
    assert seen == homes | dict.fromkeys(tb._NAMESPACES, "torchbayes")


def test_every_kind_of_posterior_can_be_read_without_its_method() -> None:
    code = "import torchbayes as tb; tb.load; print(*tb.Posterior.kinds)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    named = (getattr(tb.posterior, name) for name in tb.posterior.__all__)
    kinds = {kind.kind for kind in named if isinstance(kind, type) and hasattr(kind, "kind")}
    assert set(done.stdout.split()) == kinds - {""}
    assert {"dropout", "generated", "kronecker-gaussian"} < kinds
