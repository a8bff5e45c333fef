"""Somebody else's package adds a method: installed, it is in `fit`, the command line, reports and tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "tempered-langevin"


def python(*arguments: str, packages: Path, folder: Path) -> str:
    """What a fresh Python prints that also sees the packages installed in a folder."""
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, built and installed by pip."""
    source = tmp_path_factory.mktemp("source") / "package"
    source.mkdir()
    for file in (HERE / "package").iterdir():  # building leaves files beside the sources
        if file.is_file():
            (source / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    target = tmp_path_factory.mktemp("packages")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    python(*command, "--target", str(target), str(source), packages=target, folder=target)
    return target


def test_fit_and_the_estimators(packages: Path, tmp_path: Path) -> None:
    script = f"""
import torch, torchbayes as tb
x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
net = lambda: torch.nn.Linear(4, 2)
run = tb.fit(net, (x, y), "{NAME}", epochs=40, batch_size=20, rise=10, progress=False)
print(type(run.posterior).__name__, len(run.posterior), tb.METHODS["{NAME}"].target)
print((run.predict(x).prediction == y).float().mean().item() > 0.9)
model = tb.BayesianClassifier(method="{NAME}", epochs=2).fit(x.numpy(), y.numpy())
print(model.predict_proba(x.numpy()).shape)
"""
    printed = python("-c", script, packages=packages, folder=tmp_path).splitlines()
    assert printed == ["Samples 120 posterior", "True", "(120, 2)"]  # of four chains


def test_command_line_comparison_and_report(packages: Path, tmp_path: Path) -> None:
    common = {"packages": packages, "folder": tmp_path}
    listed = python("-m", "torchbayes", "methods", NAME, **common)
    assert "Updates until the noise has its full size." in listed
    assert "burn_in" in listed  # an option of every sampler
    quick = ["--model", "mlp", "--model-set", "hidden=[16]", "--epochs", "2"]
    methods = ["--methods", f"map,{NAME}", "--set", f"{NAME}.rise=5"]
    python("-m", "torchbayes", "compare", *quick, *methods, "--out", "out", **common)
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert results["methods"][NAME]["paper"] == "made up for a test"
    assert results["methods"][NAME]["nll"] > 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f">{NAME}<" in page


def test_the_conformance_battery(packages: Path) -> None:
    arguments = ["-m", "pytest", "-rp", "tests/conformance", "-k", NAME, "-p", "no:cacheprovider"]
    printed = python(*arguments, packages=packages, folder=ROOT)
    assert printed.count("PASSED tests/conformance") >= 18, printed


def test_a_broken_package_is_left_out_with_a_warning(tmp_path: Path) -> None:
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torchbayes.methods]\nbroken = no_such_module\n")
    script = "import torchbayes as tb; print(len(tb.METHODS) >= 19, 'broken' in tb.METHODS)"
    printed = python("-c", script, packages=tmp_path, folder=tmp_path)
    assert "True False" in printed
    assert "'broken' of an installed package could not be loaded and is left out" in printed
