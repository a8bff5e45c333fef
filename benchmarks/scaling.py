"""What every method keeps and sends: bytes per weight, and messages, in a step under data parallelism.

Run: python benchmarks/scaling.py --json results/scaling.json, and then python -m tools.records
The steps are those of `fit`, in one process that torch's fake process group tells it is one of 2, 8, 128 or
1,024, each on a machine of its own: what is sent and how often is real, the time would not be. Bytes are
those of the tensors that are handed to `torch.distributed`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import make_method
from timing import progress
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchbayes.core import distributed, reduction
from torchbayes.core.reduction import Reduction, average_gradients, sent_early
from torchbayes.models import mlp, resnet18, resnet50
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.train.registry import METHODS

RANKS = (2, 8, 128, 1024)
STEPS = 2  # that are counted, after as many
SENDING = ("all_reduce", "all_gather", "broadcast")


class Adapters(nn.Module):
    """The trained part of a transformer with LoRA: x + B A x for the queries and values of every layer."""

    def __init__(self, width: int = 4096, layers: int = 32, rank: int = 16) -> None:
        super().__init__()
        down = [nn.Linear(width, rank, bias=False) for _ in range(2 * layers)]
        up = [nn.Linear(rank, width, bias=False) for _ in range(2 * layers)]
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.frozen = nn.Linear(width, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what every adapter has to say."""
        for down, up in zip(self.down, self.up, strict=True):
            x = x + up(down(x))
        result: Tensor = self.frozen(x)
        return result


SMALL = (lambda: mlp(64, hidden=(256, 256)), (64,))
WORKED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # name: (the network, one input's shape, the processes)
    "ResNet-18": (partial(resnet18, stem="imagenet", num_classes=1000), (3, 64, 64), 128),
    "ResNet-50": (partial(resnet50, num_classes=1000), (3, 64, 64), 128),
    "LoRA": (Adapters, (4096,), 8),
}
SHOWN = ("map", "vogn", "ivon")


@contextmanager
def among(count: int) -> Iterator[None]:
    """Be the first of so many processes on as many machines."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    plain = reduction.shared_bytes
    reduction.shared_bytes = lambda _: None
    try:
        yield
    finally:
        reduction.shared_bytes = plain
        dist.destroy_process_group()


@contextmanager
def counting(sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes and messages that are handed to torch.distributed."""
    plain = {name: getattr(dist, name) for name in SENDING}

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        tensor = args[1] if name == "all_gather" else args[0]
        sent["bytes"] += tensor.numel() * tensor.itemsize
        sent["messages"] += 1
        return plain[name](*args, **kwargs)

    for name in SENDING:
        setattr(dist, name, partial(counted, name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def alive() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    memory = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance makes some of torch's own objects warn
            storage = thing.untyped_storage()
            with suppress(RuntimeError):  # torch.compile traces with tensors without memory
                memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())


def saved(state: Any) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.itemsize
    if isinstance(state, dict):
        return sum(map(saved, state.values()))
    return sum(map(saved, state)) if isinstance(state, (list, tuple)) else 0


def step_of(
    name: str, net: nn.Module, shape: tuple[int, ...], batch: int
) -> tuple[Any, Callable[[], Any]]:
    """A method on a network, and its step as `fit` takes it in one of several processes."""
    made, kept = make_method(name, net), Reduction()
    inputs, targets = torch.randn(batch, *shape), torch.randint(10, (batch,))
    share, optimizer = 1 / dist.get_world_size(), made.optimizer
    averages = made.reduces_gradients and not made.one_per_rank
    weights = [p for group in optimizer.param_groups for p in group["params"]] if averages else []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = made.loss(inputs, targets)
        early = isinstance(optimizer, WeightOptimizer)
        with optimizer.sent_early() if early else sent_early(kept, weights, share):
            loss.backward()
        average_gradients(kept, weights, share, apart=True)
        return loss

    def step() -> None:
        made.step(closure)
        if not made.one_per_rank:
            distributed.any_of([False, False])  # whether any process is to save or to stop

    return made, step


def measured(
    name: str, network: Callable[[], nn.Module], shape: tuple[int, ...], ranks: int, batch: int = 2
) -> dict[str, Any]:
    """What a method keeps and sends."""
    torch.manual_seed(0)
    sent = {"bytes": 0, "messages": 0}
    with among(ranks):
        before = alive()
        net = network()
        weights = sum(p.numel() for p in net.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in net.parameters() if not p.requires_grad)
        made, step = step_of(name, net, shape, batch)
        for _ in range(STEPS):
            step()
        with counting(sent):
            for _ in range(STEPS):
                step()
        kept = alive() - before - 4 * frozen
        state = saved(made.state_dict())
    return {
        "weights": weights,
        "kept": round(kept / weights, 1),
        "checkpoint": round((state - 4 * frozen) / weights, 1),
        "sent": round(sent["bytes"] / STEPS / weights, 2),
        "messages": sent["messages"] / STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gc.freeze()  # what was imported need not be looked through each time
    methods: dict[str, Any] = {}
    for name in METHODS:
        rows = {str(ranks): measured(name, *SMALL, ranks) for ranks in RANKS}
        methods[name] = {"apart": METHODS[name].one_per_rank, "ranks": rows}
        progress(f"{name}: {rows[str(RANKS[0])]}")
    worked: dict[str, Any] = {}
    for network, (make, shape, ranks) in WORKED.items():
        rows = {name: measured(name, make, shape, ranks, 8) for name in SHOWN}
        worked[network] = {"ranks": ranks, "rows": rows}
        progress(f"{network}: {rows}")
    if given.json is not None:
        result = {"torch": torch.__version__, "methods": methods, "worked": worked}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
