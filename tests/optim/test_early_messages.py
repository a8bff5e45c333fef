"""Messages that leave during the backward pass bring what messages after it bring; only `fit` sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchbayes as tb
from torchbayes import optim
from torchbayes.core import distributed, reduction
from torchbayes.core.reduction import Reduction, average_gradients, sent_early

from ..processes import processes

NAMES = ("VOGN", "IVON", "NoisyKFAC")
STEPS = 7


class Net(nn.Module):
    """A convolution whose weight is used twice, norms, and layers that some processes do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3)
        self.hidden, self.head = nn.Linear(27, 27), nn.Linear(27, 3)
        self.extra, self.idle = nn.Linear(27, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, extra: bool, idle: bool = True) -> Tensor:
        if not idle:  # comes last in the backward pass, and first in the order of messages
            x = x * self.idle(x[:, 0, 0, :2]).tanh().view(-1, 1, 1, 2).mean(-1, keepdim=True)
        h = self.norm(self.conv(x)).tanh().flatten(1)
        h = self.hidden(self.hidden(h).tanh()).tanh()
        return self.head(h) + (self.extra(h) if extra else 0.0)


Loss = Callable[..., None]


def as_fit(
    net: Net, optimizer: Any, case: str, rank: int, number: int, count: int, loss: Loss
) -> None:
    """One step as `fit` takes it: all backward passes in a closure, and nothing after the last one."""
    odd = number in (4, 6) and rank == 1
    pieces = {"more pieces": 2 + odd, "fewer pieces": 2 - odd}.get(case, 1)
    # From the fifth step on the layer is of use in another process than before.
    extra = rank == 0 and (case != "another layer" or number < 5)
    idle = rank != 0 or case != "a new layer" or number not in (4, 5)
    if case == "no examples" and rank == 1 and number in (0, 4):
        optimizer.step(lambda: None)
        return
    calls = iter(range(2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        if case == "interrupted" and number == 4 and next(calls) == 1:
            raise ArithmeticError
        for piece in torch.arange(count).tensor_split(pieces):
            rows = slice(int(piece[0]), int(piece[-1]) + 1)
            loss(rows, len(piece) / count, extra=extra, idle=idle, last=rows.stop == count)
        return torch.zeros(())

    def halve(*_: Any) -> None:
        assert net.head.bias.grad is not None
        net.head.bias.grad.mul_(0.5)

    # The convolution comes last, and the gradient of the head's bias has left by then.
    if case == "changed in the pass" and number in (4, 5) and rank == 1:
        hook = net.conv.register_full_backward_hook(halve)
    else:
        hook = None
    try:
        optimizer.step(closure)
    except ArithmeticError:
        assert case == "interrupted"
    if hook is not None:
        hook.remove()


def change(way: str, net: Net) -> None:
    """Change gradients after a backward pass; only the first way changes the tensors' versions."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    for p in net.parameters():
        if p.grad is None:
            continue
        if way == "clipped":
            p.grad.clamp_(-1e-3, 1e-3)
        elif way == "clipped data":
            p.grad.data.clamp_(-1e-3, 1e-3)
        elif way == "other data":
            p.grad.data = p.grad.data * 0.5
        elif way == "numpy":
            p.grad.numpy()[...] *= 0.5
    if way == "foreach":
        torch._foreach_mul_([gradient.data for gradient in gradients], 0.5)


def by_hand(
    net: Net, optimizer: Any, case: str, rank: int, number: int, count: int, loss: Loss
) -> None:
    """One step of a loop that may do anything before `step()`."""
    rows = slice(0, count)
    if case == "closure":

        def closure() -> None:
            optimizer.zero_grad()
            loss(rows)
            change("clipped data", net)

        optimizer.step(closure)
        return
    if case == "unscaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with optimizer.sampled():
            optimizer.zero_grad()
            loss(rows, 1024.0)
        scaler.scale(torch.zeros(()))  # makes it begin
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return
    with optimizer.sampled():
        optimizer.zero_grad()
        loss(rows, last=case == "last said without a closure")
    change(case, net)
    if case == "abandoned" and rank == 1 and number == 4:
        optimizer.zero_grad()
        with optimizer.sampled():
            loss(rows)
    optimizer.step()


# Steps in which messages leave during the backward pass of each process, as `fit` takes them: the first one
# shows which weights are used, and a process that had to send again does not send early any more.
ALL = list(range(1, STEPS))
AS_FIT: dict[str, tuple[list[int], list[int]]] = {
    "plain": (ALL, ALL),
    "two draws": (ALL, ALL),
    "another layer": ([1, 2, 3, 4, 6], ALL),
    "a new layer": ([1, 2, 3, 4], ALL),
    "no examples": (ALL, [2, 3, 5, 6]),
    "more pieces": (ALL, ALL),
    "fewer pieces": (ALL, ALL),
    "changed in the pass": (ALL, [1, 2, 3, 4]),
    "interrupted": ([1, 2, 3, 5, 6], [1, 2, 3, 5, 6]),
}
BY_HAND = (
    "closure", "unscaled", "clipped", "clipped data", "other data", "numpy", "foreach", "abandoned",
    "last said without a closure",
)  # fmt: skip
CASES = (*AS_FIT, *BY_HAND)


def trained(name: str, case: str, rank: int, early: set[int]) -> dict[str, Tensor]:
    """The weights after some steps; `early` gets the steps with messages during the backward pass."""
    torch.manual_seed(0)
    net = Net().double()
    draws = 2 if case in ("two draws", "interrupted") else 1
    generator = torch.Generator().manual_seed(10 + rank)
    optimizer = getattr(optim, name)(
        net, 0.05, train_size=40, generator=generator, mc_samples=draws
    )
    data = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 12, 1, 5, 5, dtype=torch.float64, generator=data)
    y, rows = torch.arange(12) % 3, (slice(0, 7), slice(7, 12))[rank]
    for number in range(STEPS):

        def loss(
            part: slice, share: float = 1.0, *, extra: bool = rank == 0, idle: bool = True,
            last: bool = False, x: Tensor = x[number, rows], y: Tensor = y[rows],
        ) -> None:  # fmt: skip
            value = F.cross_entropy(net(x[part], extra, idle), y[part]) * share
            with optimizer.sent_early() if last else nullcontext():
                value.backward()

        step = as_fit if case in AS_FIT else by_hand
        with counting() as sent:
            step(net, optimizer, case, rank, number, rows.stop - rows.start, loss)
        if sent["early"]:
            early.add(number)
    return {key: p.detach().clone() for key, p in net.named_parameters()}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the messages that leave inside a backward pass and outside of one."""
    sent, plain = {"early": 0, "late": 0}, dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        inside = torch._C._current_graph_task_id() != -1
        sent["early" if inside else "late"] += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_reduce = plain  # type: ignore[assignment]


class Averaged:
    """Gradients that are averaged, in steps of which the third has no examples in the second process.

    Args:
        rank: Number of this process.
        recomputed: Whether a layer that is used twice is recomputed in the backward pass, part by part.
    """

    def __init__(self, rank: int, recomputed: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        self.weights = [*self.net.parameters(), nn.Parameter(torch.ones(2))]  # the last one is idle
        self.kept = Reduction[int]()
        self.rank, self.recomputed = rank, recomputed
        self.found: list[list[Tensor]] = []
        self.early: list[int] = []

    def step(self) -> None:
        number, share = len(self.found), (self.rank + 1) / 3
        for p in self.weights:
            p.grad = None
        with counting() as sent:
            if not (self.rank == 1 and number == 2):
                loss = averaged_loss(self.net, float(number + self.rank), self.recomputed)
                with sent_early(self.kept, self.weights, share):
                    loss.backward()
            average_gradients(self.kept, self.weights, share, apart=True)
        self.early.append(sent["early"])
        self.found.append([p.grad.clone() for p in self.weights if p.grad is not None])


def averaged_loss(net: nn.Sequential, value: float, recomputed: bool = False) -> Tensor:
    """A mean square of a network whose first layer is used twice."""
    x = torch.full((2, 3), value, requires_grad=True)
    for _ in range(2):
        x = checkpoint(net[:2], x, use_reentrant=True) if recomputed else net[:2](x)
    result: Tensor = net[2](x).square().mean()
    return result


# What `fit` is given, and whether it sends during the backward pass.
FITTED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "map": ("map", {"accumulate": 2}, True),
    "bbb": ("bbb", {}, True),
    "vogn": ("vogn", {"accumulate": 2}, True),
    "ivon": ("ivon", {}, True),
    "ogn": ("ogn", {}, True),
    "map, clipped": ("map", {"clip_norm": 0.1}, True),  # which is done to the averages
    "vogn, clipped": ("vogn", {"clip_norm": 0.1}, False),
    "map in float16": ("map", {"amp": "float16"}, False),
    "vogn in float16": ("vogn", {"amp": "float16"}, False),
    "ivon in float16": ("ivon", {"amp": "float16"}, False),
}


def fitted(method: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The mean after a training by `fit` with a learned noise level, and how many messages left early."""
    generator = torch.Generator().manual_seed(2)
    # The last batch is of 5, in fewer pieces than the others.
    x = torch.randn(21, 3, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    with counting() as sent:
        run = tb.fit(
            net, (x, x.sum(1, keepdim=True)), method, likelihood=tb.GaussianNoise(), epochs=3,
            batch_size=8, progress=False, **options,
        )  # fmt: skip
    noise = {f"noise {n}": p.detach() for n, p in run.likelihood.named_parameters()}
    return {**run.posterior.mean(), **noise}, sent["early"]


def train(folder: Path) -> None:
    with distributed.process_group():
        rank = distributed.rank()
        reduction.shared_bytes = lambda _: None  # type: ignore[attr-defined]
        reduction.BUCKET = 2000  # type: ignore[misc]
        watches, found = Reduction.watches, {}
        for name in NAMES:
            for case in CASES:
                early: set[int] = set()
                found[f"{name} {case}"] = trained(name, case, rank, early)
                found[f"{name} {case} again"] = trained(name, case, rank, set())
                Reduction.watches = property(lambda _: False)  # type: ignore[assignment]
                none: set[int] = set()
                found[f"{name} {case} late"] = trained(name, case, rank, none)
                Reduction.watches = watches  # type: ignore[method-assign]
                assert not none
                found[f"{name} {case} steps"] = torch.tensor(sorted(early))
        for case, (method, options, _) in FITTED.items():
            for way in ("early", "late"):
                if way == "late":
                    Reduction.watches = property(lambda _: False)  # type: ignore[assignment]
                found[f"fit {case} {way}"] = fitted(method, options)
                Reduction.watches = watches  # type: ignore[method-assign]
        kept = {"recomputed": Averaged(rank, recomputed=True), "averaged": Averaged(rank)}
        for averaged in kept.values():
            for _ in range(4):
                averaged.step()
    with distributed.process_group():  # another one: connections of the first are closed
        for _ in range(2):
            kept["averaged"].step()
    for name, averaged in kept.items():
        found[name] = averaged.found, averaged.early
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("early")
    done = processes(2, train, folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_early_messages_change_nothing(name: str, case: str, found: list[dict[str, Any]]) -> None:
    for key, late in found[0][f"{name} {case} late"].items():
        for one in found:
            for way in ("", " again"):
                assert torch.equal(one[f"{name} {case}{way}"][key], late), (key, way)


@pytest.mark.parametrize("name", ["VOGN", "IVON"])
@pytest.mark.parametrize("case", AS_FIT)
def test_messages_leave_during_the_backward_pass(
    name: str, case: str, found: list[dict[str, Any]]
) -> None:
    steps = [one[f"{name} {case} steps"].tolist() for one in found]
    assert steps == list(AS_FIT[case])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", BY_HAND)
def test_a_loop_of_ones_own_sends_after_the_backward_pass(
    name: str, case: str, found: list[dict[str, Any]]
) -> None:
    assert [one[f"{name} {case} steps"].tolist() for one in found] == [[], []]


@pytest.mark.parametrize("case", FITTED)
def test_fit_sends_early_where_nothing_changes_a_gradient(
    case: str, found: list[dict[str, Any]]
) -> None:
    expected, none = found[0][f"fit {case} late"]
    assert none == 0
    assert any(name.startswith("noise") for name in expected)
    for one in found:
        weights, early = one[f"fit {case} early"]
        assert early >= 5 if FITTED[case][2] else early == 0  # of nine updates
        for key, value in expected.items():
            assert torch.equal(weights[key], value), key


@pytest.mark.parametrize("name", ["averaged", "recomputed"])
def test_averages_are_those_of_all_shares(name: str, found: list[dict[str, Any]]) -> None:
    net = Averaged(0).net
    for number in range(len(found[0][name][0])):
        net.zero_grad()
        for rank in range(2):
            if not (rank == 1 and number == 2):
                (averaged_loss(net, float(number + rank)) * ((rank + 1) / 3)).backward()
        expected = [*(p.grad for p in net.parameters()), torch.zeros(2)]
        for one in found:
            torch.testing.assert_close(one[name][0][number], expected)


def test_averages_are_sent_early_unless_they_had_to_be_sent_again(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["averaged"][1] == [0, 1, 1, 1, 0, 1]
    assert found[1]["averaged"][1] == [0, 1, 0, 1, 0, 1]
    assert found[0]["recomputed"][1] == [0, 1, 0, 0]
    assert found[1]["recomputed"][1] == [0, 1, 0, 0]
