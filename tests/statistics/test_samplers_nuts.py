"""A small Bayesian network: what samplers predict beside what the No-U-Turn Sampler does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import torchbayes as tb

from .nuts_moons import COUNT, FILE, GRID, data, network

REFERENCE = json.loads(FILE.read_text(encoding="utf-8"))


def off(method: str, **options: Any) -> float:
    """The mean total variation between a sampler's predictions and the reference's."""
    # Halves of the data make noisy gradients, which the thermostats take out.
    run = tb.fit(
        network, data(), method, epochs=600, batch_size=COUNT // 2, progress=False,
        chains=20, side_by_side=True, burn_in=0.3, samples=40, lr=0.1, average_step=0.03, **options,
    )  # fmt: skip
    probs = run.predict(GRID, 800).probs[:, 1]
    return float((probs - torch.tensor(REFERENCE["probs"])).abs().mean())


@pytest.mark.parametrize("method", ["sgnht", "atmc"])
def test_predictions_are_those_of_nuts(method: str) -> None:
    # Two chains of NUTS differ by a total variation of 0.01 themselves.
    assert REFERENCE["between_chains"] < 0.015
    assert off(method) < 0.025


def test_another_posterior_is_told_apart() -> None:
    assert off("atmc", temperature=5.0) > 0.06
