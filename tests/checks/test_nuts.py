"""Agreement with NUTS where the posterior is known, and the message where Pyro is not there."""

from __future__ import annotations

import sys

import pytest
import torch

import torchbayes as tb

from ..conformance.problems import blobs


def test_without_pyro_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyro.infer", None)
    net = torch.nn.Linear(4, 3)
    with pytest.raises(ImportError, match=r"torchbayes\[nuts\]"):
        tb.checks.compare_to_nuts(net, tb.Point(tb.snapshot(net)), blobs(20), torch.zeros(1, 4))


@pytest.mark.filterwarnings("default")
def test_bbb_on_a_linear_classifier_is_near_nuts_and_a_point_is_not() -> None:
    pytest.importorskip("pyro")
    torch.manual_seed(0)
    x, y = blobs(30)
    fresh, _ = blobs(200, seed=1)
    net = torch.nn.Linear(4, 3)
    run = tb.fit(net, (x, y), "bbb", epochs=600, batch_size=30, lr=0.01, progress=False)
    good = tb.checks.compare_to_nuts(net, run.posterior, (x, y), 0.5 * fresh, samples=80, warmup=60)
    assert len(good.reference) == 80
    point = tb.fit(torch.nn.Linear(4, 3), (x, y), "mle", epochs=300, lr=0.05, progress=False)
    bad = tb.checks.compare_to_nuts(
        net, point.posterior, (x, y), 0.5 * fresh, samples=80, warmup=60
    )
    assert good.agreement > 0.9
    assert good.total_variation < 0.1
    assert bad.total_variation > 2 * good.total_variation
