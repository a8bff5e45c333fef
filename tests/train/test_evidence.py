"""A prior that the evidence chooses while MAP trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = (x[:, 0] + 0.5 * torch.randn(120) > 0).long()
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2)), x, y


OPTIONS: dict[str, Any] = {
    "method": "map", "epochs": 6, "batch_size": 40, "lr": 0.02, "prior": 0.01, "evidence_every": 2,
    "progress": False,
}  # fmt: skip


class _Stop:
    """A logger that stops the run after its fourth epoch."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if step == 4 * 3:
            raise KeyboardInterrupt

    def artifact(self, path: Path) -> None: ...


def test_weight_decay_chooses_itself_and_resumes(tmp_path: Path) -> None:
    net, x, y = problem()
    run = tb.fit(net, (x, y), **OPTIONS)
    net = run.model
    found = [row["prior_precision"] for row in run.history]
    assert found[0] == found[1] == pytest.approx(0.01)
    assert found[2] == found[3] != found[1]
    assert found[4] > found[2] > 0.01  # by far too weak a prior for noisy labels
    again, _, _ = problem()
    kept = {"folder": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        tb.fit(again, (x, y), logger=_Stop(), **kept, **OPTIONS)
    again, _, _ = problem()
    resumed = tb.fit(again, (x, y), resume=True, **kept, **OPTIONS)
    again = resumed.model
    assert [row["prior_precision"] for row in resumed.history] == found
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))


def test_by_hand_it_is_a_laplace_posterior_and_a_new_precision() -> None:
    net, x, y = problem()
    run = tb.fit(net, (x, y), **(OPTIONS | {"epochs": 3}))
    by_hand, _, _ = problem()
    by_hand = tb.fit(by_hand, (x, y), **(OPTIONS | {"epochs": 2, "evidence_every": 0})).model
    weights = ["0.weight", "0.bias", "3.weight", "3.bias"]  # those with a prior: no norms
    la = tb.Laplace(by_hand, (x, y), tb.Categorical(), subset=weights, prior=0.01, check=False)
    best = la.optimize_prior().precision
    assert isinstance(best, float)
    assert run.history[2]["prior_precision"] == pytest.approx(math.sqrt(0.01 * best), rel=1e-4)
    optimizer = tb.MAP(by_hand, train_size=120, prior=0.01)
    optimizer.precision = best
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == pytest.approx([best / 120, 0.0])


def test_the_chosen_prior_starts_other_methods() -> None:
    net, x, y = problem()
    run = tb.fit(net, (x, y), epochs=30, lr=0.02, progress=False)
    weights = ["0.weight", "0.bias", "3.weight", "3.bias"]
    la = tb.Laplace(run.model.eval(), (x, y), subset=weights, check=False)
    one = la.optimize_prior()
    tb.VOGN(net, train_size=120, prior=one)
    each = la.optimize_prior(per_layer=True)
    tb.IVON(nn.Sequential(net[0], net[2], net[3]), train_size=120, prior=one)  # type: ignore[index]
    assert isinstance(each.precision, dict)


@pytest.mark.parametrize(
    "options", [{"evidence_every": -1}, {"prior": 0.0}, {"prior": tb.ScaleMixturePrior()}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    net, x, y = problem()
    with pytest.raises(ValueError, match="evidence_every"):
        tb.fit(net, (x, y), **(OPTIONS | options))
