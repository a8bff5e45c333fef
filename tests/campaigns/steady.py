"""Two thousand steps and five hundred predictions: memory, tensors and hooks do not grow."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes import optim

from ..conformance.faults import surroundings
from ..conformance.problems import blobs, small_net
from ..processes import forkserver

__all__ = ["SUBJECTS", "measure", "rounds"]

STEPS, PREDICTIONS, WARM = 2000, 500, 1500
_BYTES = 1 << 19  # a leak of half a kilobyte a step


def _optimiser(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model, kind = small_net(), getattr(optim, name)
    optimizer = kind(model) if kind is optim.MLE else kind(model, train_size=240)
    x, y = blobs(48)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def _wrapper(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    x, y = blobs(48)
    model: Any = small_net()
    net: Any = {
        "MeanField": tb.MeanField, "Hypernet": tb.Hypernet, "MCDropout": tb.MCDropout, "SWA": lambda m: m,
        "SWAG": lambda m: m, "HWA": tb.MeanField, "VBLL": lambda m: tb.VBLL(m, train_size=240),
    }[name](model)  # fmt: skip
    averager = getattr(tb, name)(net) if name in ("SWA", "SWAG", "HWA") else None
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = net.loss(x, y) if name == "VBLL" else F.cross_entropy(net(x), y)
        if name in ("MeanField", "HWA"):
            loss = loss + net.kl() / 240
        loss.backward()
        optimizer.step()
        if averager is not None:
            averager.update()

    return step


def _predictions(kind: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model, (x, _) = small_net(), blobs(48)
    mean = tb.snapshot(model)
    posterior: tb.Posterior = tb.Samples.of([small_net() for _ in range(4)])
    if kind == "Gaussian":
        posterior = tb.Gaussian(mean, {n: torch.full_like(t, 0.1) for n, t in mean.items()})
    return lambda: tb.predictive(model, posterior, x, 4) and None  # type: ignore[func-returns-value]


def _discarded(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = small_net()
    before = surroundings(model)["hooks"]
    kind = getattr(optim, name)

    def make() -> None:
        kind(model) if kind is optim.MLE else kind(model, train_size=240)
        assert surroundings(model)["hooks"] == before

    return make


SUBJECTS: dict[str, tuple[Callable[[], Callable[[], None]], int]] = {
    **{name: (lambda name=name: _optimiser(name), STEPS) for name in optim.__all__},
    **{
        name: (lambda name=name: _wrapper(name), STEPS)
        for name in ("MeanField", "Hypernet", "MCDropout", "VBLL", "SWA", "SWAG", "HWA")
    },
    **{
        f"predictive, {kind}": (lambda kind=kind: _predictions(kind), PREDICTIONS)
        for kind in ("Gaussian", "Samples")
    },
    **{f"discarded {name}": (lambda name=name: _discarded(name), 300) for name in optim.__all__},
}


def _resident() -> int:
    """Return the memory of this process's own; pages of libraries come and go."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), (Tensor, nn.Module)) for thing in gc.get_objects())


def measure(name: str, share: float = 1.0) -> str:
    """Return "steady", or what has grown."""
    torch.set_num_threads(1)
    make, steps = SUBJECTS[name]
    step = make()
    # The heap and the collector's oldest generation settle after some 1,500 steps.
    for _ in range(max(20, int(share * min(WARM, steps)))):
        step()
    _tensors()  # which takes memory itself, the first time
    tensors = _tensors()
    sizes = [_resident()]
    for _ in range(2):
        for _ in range(int(share * steps / 2)):
            step()
        sizes.append(_resident())
    more = _tensors() - tensors
    if more > 2:
        return f"{more} more tensors"
    # The heap may take a piece of memory once, at any time; a leak grows in both halves.
    grown = min(sizes[1] - sizes[0], sizes[2] - sizes[1])
    if grown < _BYTES:
        return "steady"
    return f"grew by {grown / 1e6:.1f} MB in each {int(share * steps / 2)} steps"


def _child(name: str, share: float, file: str) -> None:
    verdict = measure(name, share)
    with open(file, "w") as out:
        out.write(verdict)


def rounds(folder: Any, share: float = 1.0) -> Iterator[tuple[str, str]]:
    """Measure every subject once, each in a fresh process; yield subject and verdict."""
    for number, name in enumerate(SUBJECTS):
        file = folder / f"{number}.txt"
        child = forkserver().Process(target=_child, args=(name, share, str(file)))
        child.start()
        child.join(900)
        if child.is_alive():
            child.kill()
        yield name, file.read_text() if file.exists() else f"code {child.exitcode}"
