"""The class in a loop of the user's own, and `fit`: the same algorithm, bit for bit, with no option given.

What `fit` alone knows is repeated here: which seeds it takes, in which order it goes through the data, after
which updates a chain's state is kept, when an average begins and at which rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.data import BatchLoader
from torchbayes.train.averaging import HwaMethod, SwaMethod
from torchbayes.train.chains import Collection, SamplerMethod
from torchbayes.train.ensemble import EnsembleMethod
from torchbayes.train.laplace import LaplaceMethod
from torchbayes.train.method import Method
from torchbayes.train.optimizer import OptimizerMethod
from torchbayes.train.registry import METHODS
from torchbayes.train.wrapper import (
    HypernetMethod,
    LastLayerMethod,
    MeanFieldMethod,
    WrapperMethod,
)

from .problems import blobs, small_net
from .test_methods import assert_equal

EPOCHS, BATCH, SEED = (
    4,
    12,
    5,
)  # with 40 updates in the 20 cycles of an average, a cycle has two rates
INPUTS, TARGETS = blobs()
N = len(INPUTS)
STEPS = -(-N // BATCH)


def batches(
    first: int = 0, last: int = EPOCHS, *, independent: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of some epochs, in the order in which `fit` goes through them."""
    loader = BatchLoader(INPUTS, TARGETS, BATCH, shuffle=True, seed=SEED)
    loader.independent = independent
    for epoch in range(first, last):
        yield from loader.batches(epoch)  # type: ignore[misc]


def start() -> tuple[nn.Module, torch.Generator]:
    """A network with the seeds that `fit` gives to the network, to training and to the method."""
    torch.manual_seed(SEED)
    model = small_net()
    torch.manual_seed(SEED + 1_000_003)
    return model, torch.Generator().manual_seed(SEED + 7_919)


def made(cls: Callable[..., Any], first: Any, generator: torch.Generator) -> Any:
    """An object of a class with its own defaults; only facts are given, where it asks for them."""
    facts = {
        "train_size": N, "generator": generator, "steps": EPOCHS * STEPS, "batch_size": BATCH,
    }  # fmt: skip
    known = inspect.signature(cls).parameters
    return cls(first, **{name: fact for name, fact in facts.items() if name in known})


def step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[arg-type]


def by_optimizer(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    optimizer = made(method.algorithm, model, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
    return optimizer.posterior()


def by_sampler(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    sampler, samples = made(method.algorithm, model, generator), tb.Samples(model)
    keep = Collection(sampler.warmup / (EPOCHS * STEPS) or 0.5).updates(EPOCHS * STEPS)
    for update, (x, y) in enumerate(batches(independent=True), 1):
        step(sampler, lambda x=x, y=y: F.cross_entropy(model(x), y))
        if update in keep:
            samples.append()
    return samples


def by_wrapper(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    net = made(method.algorithm, model, generator)
    optimizer = made(tb.MAP, model, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: F.cross_entropy(net(x), y))
    return net.posterior()


def by_mean_field(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    net = made(method.algorithm, model, generator)
    optimizer = made(tb.MLE, net, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: F.cross_entropy(net(x), y) + net.kl() / N)
    return net.posterior()


def by_last_layer(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    net = made(method.algorithm, model, generator)
    optimizer = made(tb.MLE, net, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: net.loss(x, y))
    return net.posterior()


def by_hypernet(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    seed = int(torch.randint(2**62, (1,), generator=generator))  # processes share the latents
    net = method.algorithm(model, generator=torch.Generator().manual_seed(seed))
    optimizer = made(tb.variational.HypernetSGD, net, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: F.cross_entropy(net(x), y))
    return net.posterior()


def by_average(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    optimizer = made(tb.MAP, model, generator)
    average = made(method.algorithm, model, generator)
    first = EPOCHS * 3 // 4  # the last quarter is averaged, at three times the rate
    ends = tb.Schedule("cyclic", cycles=20, low=1.0).cycle_ends(EPOCHS - first, STEPS)
    for x, y in batches(0, first):
        step(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
    for group in optimizer.param_groups:
        group["lr"] *= 3
    for update, (x, y) in enumerate(batches(first), 1):
        step(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
        if update in ends:
            average.update()
    return average.posterior()


def by_hwa(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    net = made(tb.MeanField, model, generator)
    optimizer, average = made(tb.MLE, net, generator), method.algorithm(net)
    for x, y in batches(0, EPOCHS // 2):
        step(optimizer, lambda x=x, y=y: F.cross_entropy(net(x), y) + net.kl() / N)
    cyclic = tb.Schedule("cyclic", cycles=20, low=0.01)
    scheduler = cyclic.build(optimizer, EPOCHS // 2, STEPS)
    ends = cyclic.cycle_ends(EPOCHS // 2, STEPS)
    for update, (x, y) in enumerate(batches(EPOCHS // 2), 1):
        step(optimizer, lambda x=x, y=y: F.cross_entropy(net(x), y) + net.kl() / N)
        scheduler.step()
        if update in ends:
            average.update()
    return average.posterior()


def by_ensemble(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    members = tb.Samples(model)
    for member in range(5):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        model.load_state_dict(small_net().state_dict())
        optimizer = made(tb.MAP, model, generator)
        for x, y in batches(member * EPOCHS, (member + 1) * EPOCHS):
            step(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
        members.append()
    return members


def by_laplace(method: type[Method]) -> tb.Posterior:
    model, generator = start()
    optimizer = made(tb.MAP, model, generator)
    for x, y in batches():
        step(optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))
    la = tb.Laplace(model, batches(EPOCHS - 1), subset="last_layer", check=False)
    la.optimize_prior()
    return la.posterior(hold=tb.snapshot(model))


LOOPS: dict[type[Method], Callable[[type[Method]], tb.Posterior]] = {
    OptimizerMethod: by_optimizer,
    SamplerMethod: by_sampler,
    WrapperMethod: by_wrapper,
    MeanFieldMethod: by_mean_field,
    HypernetMethod: by_hypernet,
    LastLayerMethod: by_last_layer,
    SwaMethod: by_average,
    HwaMethod: by_hwa,
    EnsembleMethod: by_ensemble,
    LaplaceMethod: by_laplace,
}


@pytest.mark.parametrize("name", list(METHODS))
def test_fit_is_the_class_in_a_loop(name: str) -> None:
    method = METHODS[name]
    loop = next((LOOPS[base] for base in method.__mro__ if base in LOOPS), None)
    if loop is None:
        pytest.skip("a method with a loop of its own")
    # A small network has several chains by default, and members side by side; a loop by hand is one of them.
    one: dict[str, Any] = {"chains": 1} if issubclass(method, SamplerMethod) else {}
    if issubclass(method, EnsembleMethod):
        one = {"side_by_side": False}
    run = tb.fit(
        small_net, (INPUTS, TARGETS), name, epochs=EPOCHS, batch_size=BATCH, seed=SEED,
        progress=False, **one,
    )  # fmt: skip
    with torch.random.fork_rng():
        assert_equal(run.posterior, loop(method))
