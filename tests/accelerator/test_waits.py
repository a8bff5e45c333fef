"""How often a step waits for the device: never, but for what is said here and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes import optim
from torchbayes.train.failures import TrainingError
from torchbayes.train.progress import NoProgress
from torchbayes.train.registry import METHODS

from ..conformance.problems import blobs, small_net
from ..stopping import Stopped
from .synchronisations import Wait, counted_synchronisations


@pytest.mark.parametrize("name", optim.__all__)
def test_steps_of_a_loop_of_ones_own(name: str, device: torch.device) -> None:
    kind: Any = getattr(optim, name)
    model = small_net().to(device)
    optimizer = kind(model, **({} if name == "MLE" else {"train_size": 240}))
    x, y = (tensor.to(device) for tensor in blobs(16))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    with counted_synchronisations() as waits:
        for _ in range(4):
            optimizer.step(closure)
    assert not waits, waits


class _Counting(NoProgress):
    """Counts the waits of some updates, and stops the run after them if it should."""

    def __init__(self, first: int, last: int, *, stop: bool = False) -> None:
        self.updates, self.window, self.stop = 0, (first, last), stop
        self.waits = [Wait("nothing", "nowhere")]

    def advance(self, loss: float) -> None:
        self.updates += 1
        if self.updates == self.window[0]:
            self._block = counted_synchronisations()
            self.waits = self._block.__enter__()
        elif self.updates == self.window[1]:
            self._block.__exit__(None, None, None)
            if self.stop:
                raise Stopped


# HWA takes a snapshot at the end of every cycle, here at every update, and looks whether it is a Gaussian.
IN_FIT = {"hwa": 1}


@pytest.mark.parametrize("method", METHODS)
def test_updates_of_fit(method: str, device: torch.device) -> None:
    """Losses are read one update late, batches are sent without waiting."""
    counting = _Counting(4, 8)
    tb.fit(small_net, blobs(160), method, epochs=1, batch_size=16, device=device, progress=counting)
    assert len(counting.waits) <= 4 * IN_FIT.get(method, 0), counting.waits


# Of 120 updates, 10 an epoch: samplers' samples and traces; the descent of a sampler's warm-up, most of it;
# its survey, from 6 to 200 updates of a run, which looks up to four times an update at how much the gradients
# vary: that decides what comes next. And more than a round of K-FAC's decompositions.
WINDOWS = {
    "samples": (("atmc", "psgld", "sgnht"), (105, 109), 0),
    "descent": (("sgld",), (21, 25), 0),
    "survey": (("sghmc",), (85, 89), 4),
    "decompositions": (("kfac", "noisy-kfac"), (12, 23), 0),
    "inside a cycle": (("hwa",), (63, 65), 0),
}


@pytest.mark.parametrize(
    ("method", "part"), [(method, part) for part, (of, _, _) in WINDOWS.items() for method in of]
)
def test_updates_of_a_longer_run(method: str, part: str, device: torch.device) -> None:
    _, (first, last), most = WINDOWS[part]
    counting = _Counting(first, last, stop=True)
    with pytest.raises(Stopped):
        tb.fit(
            small_net,
            blobs(300),
            method,
            epochs=12,
            batch_size=30,
            device=device,
            progress=counting,
        )
    assert len(counting.waits) <= (last - first) * most, counting.waits


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize("method", ["map", "ivon"])
def test_a_late_look_names_the_step_and_the_layer(method: str, device: torch.device) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), _Square(), nn.Linear(4, 3))

    inputs, targets = blobs(32)
    with pytest.raises(TrainingError, match=r"step 0 .*layer '1' gives non-finite") as failed:
        tb.fit(
            network, (1e30 * inputs, targets), method, epochs=2, batch_size=8, device=device,
            progress=False,
        )  # fmt: skip
    assert failed.value.step == 0
