"""Bayes by Backprop through `fit`: its objective, schedules, logs and warnings."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import torchbayes as tb
from torchbayes.train.method import Plan
from torchbayes.train.registry import METHODS
from torchbayes.train.wrapper import MeanFieldMethod
from torchbayes.variational import blundell_weight


def blobs(count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % 3
    return 3 * torch.eye(3)[targets] + torch.randn(count, 3, generator=generator), targets


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def plan(**changes: int) -> Plan:
    settings = {"train_size": 120, "epochs": 4, "steps_per_epoch": 5, **changes}
    return Plan(generator=torch.Generator().manual_seed(0), new_model=small, **settings)


def method(**options: object) -> MeanFieldMethod:
    torch.manual_seed(0)
    return METHODS["bbb"](small(), tb.Categorical(), plan(), **options)


@pytest.mark.parametrize("estimator", [tb.shared_draw, tb.flipout, tb.local_reparameterisation])
@pytest.mark.parametrize("prior", [1.0, tb.ScaleMixturePrior(std2=0.1)])
def test_fits(estimator: object, prior: object) -> None:
    run = tb.fit(
        small, blobs(), "bbb", epochs=40, batch_size=20, lr=0.01, estimator=estimator, prior=prior,
        validation=blobs(), progress=False,
    )  # fmt: skip
    assert isinstance(run.posterior, tb.Gaussian)
    inputs, targets = blobs()
    assert (run.predict(inputs, 16).prediction == targets).float().mean() > 0.9
    last = run.history[-1]
    assert last["loss"] == pytest.approx(
        last["nll"] + last["kl"], rel=1e-5
    )  # the weight is 1 by now
    assert last["validation_accuracy"] > 0.9


def test_loss_is_the_mean_over_draws() -> None:
    inputs, targets = blobs()
    three, one = method(mc_samples=3, kl_schedule="uniform"), method(kl_schedule="uniform")
    loss = three.loss(inputs, targets)
    parts = [one.loss(inputs, targets) for _ in range(3)]  # the same generator, so the same draws
    torch.testing.assert_close(loss, torch.stack(parts).mean())
    kl = one.module.kl().detach() / 120
    torch.testing.assert_close(three.logs["kl"], kl)
    torch.testing.assert_close(three.logs["nll"] + three.logs["kl"], loss.detach())


def test_mixture_kl_is_averaged_over_the_same_draws() -> None:
    inputs, targets = blobs()
    options = {"prior": tb.ScaleMixturePrior(), "kl_schedule": "uniform"}
    three, one = method(mc_samples=3, **options), method(**options)
    loss = three.loss(inputs, targets)
    torch.testing.assert_close(
        loss, torch.stack([one.loss(inputs, targets) for _ in range(3)]).mean()
    )


def test_kl_schedules() -> None:
    inputs, targets = blobs()

    def weights(**options: object) -> list[float]:
        made, seen = method(**options), []

        def closure() -> torch.Tensor:
            made.optimizer.zero_grad()
            loss = made.loss(inputs, targets)
            loss.backward()
            seen.append(float((loss.detach() - made.logs["nll"]) / made.logs["kl"]))
            return loss

        for _ in range(12):
            made.step(closure)
        return seen

    assert weights(kl_schedule="uniform") == pytest.approx([1.0] * 12, rel=1e-4)
    rise = [min(1.0, i / 10) for i in range(1, 13)]  # half of 4 epochs of 5 updates
    assert weights(kl_schedule="linear", kl_warmup=0.5) == pytest.approx(rise, rel=1e-4)
    assert weights(kl_schedule="linear", kl_warmup=0.0) == pytest.approx([1.0] * 12, rel=1e-4)
    restarted = [blundell_weight(i % 5, 5) for i in range(12)]
    assert weights(kl_schedule="blundell") == pytest.approx(restarted, rel=1e-4)


def test_a_resumed_run_goes_on_in_the_schedule() -> None:
    one, two = method(), method()
    one.updates = 7
    two.load_state_dict(one.state_dict())
    assert two.kl_weight == one.kl_weight
    assert two.updates == 7


def test_warns_of_a_collapse_to_the_prior() -> None:
    collapsed = method(prior=100.0, kl_schedule="uniform", init_std=0.05)  # unbounded σ
    with torch.no_grad():
        for mean, rho in zip(
            collapsed.model.parameters(), collapsed.module.rho.parameters(), strict=True
        ):
            mean.zero_()
            rho.fill_(math.log(math.expm1(0.1)))  # σ = 0.1 = 1/√100
    collapsed.loss(*blobs())
    collapsed.end_epoch(0, [])  # too early to tell
    with pytest.warns(UserWarning, match="collapsed to the prior"):
        collapsed.end_epoch(2, [])
    collapsed.end_epoch(3, [])  # said once


def test_warns_of_a_collapse_to_a_point() -> None:
    with pytest.warns(UserWarning, match="collapsed to a point") as record:
        tb.fit(small, blobs(), "bbb", epochs=3, init_std=1e-6, progress=False)
    assert len(record) == 1


def test_no_warning_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.fit(small, blobs(), "bbb", epochs=20, batch_size=20, lr=0.01, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "flip"}, "estimator is 'flip': expected shared_draw"),
        ({"prior": "laplace"}, "prior is 'laplace': expected a prior such as"),
        ({"prior": 0.0}, "prior is 0: without a prior the spread"),
        ({"mc_samples": 0}, "mc_samples is 0: expected at least 1 draw"),
        (
            {"kl_schedule": "cosine"},
            "kl_schedule is 'cosine': expected uniform or blundell or linear",
        ),
        ({"kl_warmup": 1.5}, "kl_warmup is 1.5: expected a share of the updates, 0 to 1"),
        ({"init_std": 0.0}, "init_std is 0"),
        ({"lr": 0.0}, "lr is 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        method(**options)
