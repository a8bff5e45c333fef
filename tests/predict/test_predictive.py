"""`predictive` against a hand-written loop, `recalibrate_batchnorm` against NumPy."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.posterior import Posterior
from torchbayes.predict import passes

# The models here have batch norm; its own tests are in test_batchnorm.py.
pytestmark = pytest.mark.filterwarnings("ignore:all draws of this")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def spread(model: nn.Module, std: float = 0.3) -> tb.Gaussian:
    widths = {n: torch.full_like(p, std) for n, p in model.named_parameters() if p.requires_grad}
    return tb.Gaussian(tb.snapshot(model), widths, model_name=type(model).__name__)


def by_hand(
    model: nn.Module, posterior: Posterior, samples: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Draw, run, softmax, average: nothing else."""
    model = copy.deepcopy(model).eval()
    generator = seeded(5)
    with torch.no_grad():
        probs = [
            functional_call(model, posterior.sample(generator), args, kwargs).softmax(1)
            for _ in range(samples)
        ]
    return torch.stack(probs).mean(0)


class Sums(nn.Module):
    """Takes two inputs by position or name, has batch norm and dropout, and counts its calls."""

    sizes: ClassVar[list[int]] = []  # the network's copies count too

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(2, 8)
        self.norm, self.drop, self.last = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        self.sizes.append(len(a))
        hidden = self.first(a) if b is None else self.first(a) + self.second(b)
        logits: Tensor = self.last(self.drop(self.norm(hidden)).tanh())
        return logits


@pytest.fixture
def model() -> Sums:
    torch.manual_seed(0)
    model = Sums()
    model.sizes.clear()
    model.norm.running_mean.add_(0.5)  # type: ignore[union-attr, operator]
    return model


@pytest.fixture(params=["chosen", "loop", "vmap"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "loop":
        monkeypatch.setattr(passes, "_VMAP_BYTES", 0)
    elif request.param == "vmap":
        monkeypatch.setattr(passes, "_VMAP_BYTES", 1 << 40)
        monkeypatch.setattr(passes, "_VMAP_WEIGHTS", 1 << 40)
    return str(request.param)


# -- The numbers --------------------------------------------------------------------------------------


def test_it_is_the_loop_over_draws(model: Sums, path: str) -> None:
    x, q = normals(20, 3), spread(model)
    p = tb.predictive(model, q, x, samples=9, generator=seeded(5))
    model.sizes.clear()
    torch.testing.assert_close(p.probs, by_hand(model, q, 9, x))
    assert p.draws == 9
    assert len(p) == 20
    assert not p.probs.requires_grad


def test_both_paths_are_really_taken(model: Sums, path: str) -> None:
    tb.predictive(model, spread(model), normals(20, 3), samples=9)
    passes = sum(1 for size in model.sizes if size == 20)
    assert passes == {"loop": 9, "vmap": 1, "chosen": 1}[path]


def inputs_of_every_form() -> dict[str, Callable[[], Any]]:
    a, b, y = normals(20, 3), normals(20, 2, seed=1), torch.arange(20) % 4
    cuts = [slice(0, 8), slice(8, 16), slice(16, 20)]
    return {
        "tensor": lambda: a,
        "tuple": lambda: (a, b),
        "dict": lambda: {"a": a, "b": b},
        "mapping": lambda: collections.UserDict({"b": b, "a": a}),
        "list of tensors": lambda: [a[c] for c in cuts],
        "list of pairs": lambda: [(a[c], y[c]) for c in cuts],
        "list of tuples and targets": lambda: [((a[c], b[c]), y[c]) for c in cuts],
        "list of dicts": lambda: [{"a": a[c], "b": b[c]} for c in cuts],
        "list of dicts with targets": lambda: [{"a": a[c], "b": b[c], "y": y[c]} for c in cuts],
        "generator": lambda: (a[c] for c in cuts),
        "iterator of pairs": lambda: iter([[a[c], y[c]] for c in cuts]),
        "with an empty batch": lambda: [a[:0], a[:8], a[8:8], a[8:]],
        "DataLoader": lambda: DataLoader(TensorDataset(a, y), batch_size=7),
        "DataLoader of inputs": lambda: DataLoader(TensorDataset(a), batch_size=7),
    }


@pytest.mark.parametrize("max_memory", [1, 30_000, 1 << 30])
@pytest.mark.parametrize("form", inputs_of_every_form())
def test_every_form_of_inputs(model: Sums, form: str, max_memory: int) -> None:
    a, b = normals(20, 3), normals(20, 2, seed=1)
    two = form in ("tuple", "dict", "mapping") or "tuples" in form or "dicts" in form
    q = spread(model)
    truth = by_hand(model, q, 5, a, b) if two else by_hand(model, q, 5, a)
    p = tb.predictive(
        model,
        q,
        inputs_of_every_form()[form](),
        samples=5,
        generator=seeded(5),
        max_memory=max_memory,
    )
    torch.testing.assert_close(p.probs, truth)


def test_regression_in_pieces_is_one_mixture(model: Sums, path: str) -> None:
    q, noise = spread(model), tb.GaussianNoise(0.3)
    whole = tb.predictive(model, q, normals(20, 3), 6, noise, seeded(5))
    pieces = tb.predictive(
        model, q, [normals(20, 3)[:13], normals(20, 3)[13:]], 6, noise, seeded(5), 2000
    )
    assert isinstance(whole, tb.RegressionPredictive)
    assert isinstance(pieces, tb.RegressionPredictive)
    assert pieces.outputs.shape == (6, 20, 4)
    torch.testing.assert_close(pieces.outputs, whole.outputs)
    torch.testing.assert_close(pieces.std, whole.std)


def test_members_of_a_bank_are_used_once_each_with_their_buffers(model: Sums, path: str) -> None:
    bank = tb.Samples(model)
    for shift in range(3):
        nn.init.normal_(model.first.weight, generator=seeded(shift))
        model.norm.running_var.fill_(shift + 0.5)  # type: ignore[union-attr, operator]
        bank.append()
    x = normals(10, 3)
    frozen = copy.deepcopy(model).eval()
    truth = torch.stack([functional_call(frozen, draw, (x,)).softmax(1) for draw in bank]).mean(0)
    p = tb.predictive(model, bank, x, samples=32)
    assert p.draws == 3
    torch.testing.assert_close(p.probs, truth.detach())
    assert tb.predictive(model, tb.Point(bank[0]), x, samples=32).draws == 1


def test_a_model_in_double_precision(path: str) -> None:
    model = nn.Linear(3, 2).double()
    q, x = spread(model), normals(5, 3).double()
    p = tb.predictive(model, q, x, samples=4, generator=seeded(5))
    torch.testing.assert_close(p.probs, by_hand(model, q, 4, x), rtol=1e-12, atol=0)


# -- Modules that vmap cannot take --------------------------------------------------------------------


class LooksAtItsNumbers(nn.Module):
    calls = 0
    tried = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        hidden: Tensor = self.layer(x)
        return hidden * 2 if hidden.sum().item() > 0 else hidden


class Recurrent(nn.Module):
    calls = 0
    tried = 0

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        logits: Tensor = self.last(self.lstm(x.unsqueeze(1))[0][:, -1])
        return logits


class Raises(nn.Module):
    """Refuses vmap's tensors with an error of its own."""

    calls = 0
    tried = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        logits: Tensor = self.layer(x)
        try:
            logits.data_ptr()
        except RuntimeError as error:
            raise KeyError("no data") from error
        return logits


@pytest.mark.parametrize("kind", [LooksAtItsNumbers, Recurrent, Raises])
def test_what_cannot_be_batched_falls_back(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_VMAP_BYTES", 1 << 40)
    torch.manual_seed(0)
    model = kind()
    kind.calls = 0
    x, q = normals(6, 3), spread(model, 1.0)
    p = tb.predictive(model, q, [x[:4], x[4:]], samples=5, generator=seeded(5))
    # Two passes to measure, one attempt unless they showed an operation without a rule, then the loop: an
    # attempt that failed is not repeated.
    assert kind.calls == 2 + kind.tried + 2 * 5
    torch.testing.assert_close(
        p.probs, torch.cat([by_hand(model, q, 5, x[:4]), by_hand(model, q, 5, x[4:])])
    )


def test_the_error_of_the_loop_is_the_one_shown(path: str) -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise ArithmeticError("the model's own words")
            return super().forward(x)

    model = Wrong(3, 4)
    with pytest.raises(ArithmeticError, match="the model's own words"):
        tb.predictive(model, spread(model), normals(5, 3), samples=4)


def test_large_weights_are_not_copied_side_by_side() -> None:
    """vmap would take ten times as long and 64 times the memory of one draw."""
    calls = 0

    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    model = Wide(500, 500)
    tb.predictive(model, spread(model), normals(1, 500), samples=8)
    assert calls == 2 + 8


# -- Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [nn.Linear, lambda a, b: nn.utils.parametrizations.weight_norm(nn.Linear(a, b))]
)
def test_large_weights_do_not_cut_batches_up(make: Callable[[int, int], nn.Module]) -> None:
    """Weights, transposed or made in the forward pass, are no part of an example's memory."""
    sizes: list[int] = []
    model = nn.Sequential(make(20, 1500), nn.ReLU(), make(1500, 1500), nn.ReLU(), make(1500, 3))
    model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    tb.predictive(model, tb.Point(tb.snapshot(model)), normals(500, 20))
    assert max(sizes) == 500


def test_pieces_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as large as the weights ask for where the cache's size would make them small."""
    sizes: list[int] = []
    model = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 3))
    model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    q, x = tb.Point(tb.snapshot(model)), normals(200, 3)
    monkeypatch.setattr(passes, "_CPU_PIECE", 90 * 2 * 256 * 4)
    tb.predictive(model, q, x)
    assert sizes[2:] == [67, 67, 66]  # after two to measure
    monkeypatch.setattr(passes, "_PER_WEIGHT", 1 << 20)
    sizes.clear()
    tb.predictive(model, q, x)
    assert sizes[2:] == [200]


@pytest.mark.parametrize("max_memory", [1 << 16, 1 << 18, 1 << 20])
def test_batches_are_cut_to_the_memory(model: Sums, max_memory: int) -> None:
    big = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 3))
    sizes: list[int] = []
    big.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    q, x = spread(big), normals(200, 3)
    p = tb.predictive(big, q, x, samples=2, generator=seeded(5), max_memory=max_memory)
    # The largest layer reads and writes 256 floats per example, for which a quarter is set aside.
    assert 2 * 256 * 4 * max(sizes) <= max_memory / 4
    assert 2 * 256 * 4 * max(sizes) > max_memory / 8
    torch.testing.assert_close(p.probs, by_hand(big, q, 2, x))


def test_longer_examples_later_on_are_measured_anew() -> None:
    sizes: list[tuple[int, ...]] = []

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 64)

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(tuple(x.shape))
            logits: Tensor = self.layer(x.unsqueeze(2)).mean(1)
            return logits

    model = Mean()
    q = spread(model)
    tb.predictive(model, q, [normals(64, 2), normals(64, 500)], samples=2, max_memory=4 << 20)
    assert (64, 2) in sizes
    longest = max(n for n, length in sizes if length == 500)
    assert 2 * longest * 500 * 64 * 4 <= 1 << 20


def peak_memory(run: Callable[[], Any]) -> int:
    """The most bytes of tensors alive at once, from every allocation that torch makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return int(np.cumsum([nbytes for _, nbytes in sorted(changes, key=lambda c: c[0])]).max())


@pytest.mark.parametrize(
    "make", [lambda m: tb.Point(tb.snapshot(m)), spread], ids=["point", "many"]
)
def test_the_peak_is_bounded(
    make: Callable[[nn.Module], Posterior], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB of activations for each of two layers, and 8 MB of draws, in 8 MB."""
    monkeypatch.setattr(passes, "_CPU_PIECE", 1 << 40)  # leave max_memory alone in charge
    model = nn.Sequential(nn.Linear(10, 20_000), nn.ReLU(), nn.Linear(20_000, 2))
    posterior, x = make(model), normals(500, 10)

    def run(max_memory: int) -> Any:
        return tb.predictive(model, posterior, x, samples=8, max_memory=max_memory)

    assert peak_memory(lambda: run(8 << 20)) < 8 << 20
    if isinstance(posterior, tb.Point):
        assert peak_memory(lambda: run(1 << 40)) > 75 << 20  # there is something to save


class Tracked(Posterior):
    """Counts how many of its draws are alive."""

    def __init__(self, model: nn.Module) -> None:
        self.weights, self.alive, self.peak, self.made = tb.snapshot(model), 0, 0, 0

    def mean(self) -> tb.Weights:
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def sample(self, generator: torch.Generator | None = None) -> tb.Weights:
        draw = self.mean()
        weakref.finalize(draw["weight"], self.freed)
        self.alive += 1
        self.made += 1
        self.peak = max(self.peak, self.alive)
        return draw

    def freed(self) -> None:
        self.alive -= 1

    def _file_tensors(self) -> dict[str, tb.Weights]:
        raise NotImplementedError

    @classmethod
    def _from_file(cls, groups: dict[str, tb.Weights], settings: dict[str, Any]) -> Posterior:
        raise NotImplementedError


@pytest.mark.parametrize("width", [10, 400])
def test_draws_that_do_not_fit_are_not_kept(width: int) -> None:
    model = nn.Linear(width, 2)
    one = 4 * (2 * width + 2)
    q = Tracked(model)
    loader = [normals(4, width) for _ in range(6)]
    tb.predictive(model, q, loader, samples=20, max_memory=16 * one)
    assert q.peak <= 8
    # And because they are made again for every block of batches, blocks are as large as can be.
    assert q.made < 6 * 20
    plenty = Tracked(model)
    tb.predictive(model, plenty, loader, samples=20)
    assert plenty.made == 21  # once each, and the first to look at


# -- Nothing is left behind ---------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "bits": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identity": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_hooks) for name, module in model.named_modules()},
    }


def assert_as_before(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    bits, old = after.pop("bits"), before["bits"]
    assert all(torch.equal(bits[name], tensor) for name, tensor in old.items())
    assert after == {key: value for key, value in before.items() if key != "bits"}


def mixed_modes(model: Sums) -> Sums:
    model.train()
    model.norm.eval()
    model.last.eval()
    model.second.weight.requires_grad_(False)
    return model


def test_the_model_is_as_before(model: Sums, path: str) -> None:
    before = state(mixed_modes(model))
    tb.predictive(model, spread(model), normals(20, 3), samples=5)
    assert_as_before(model, before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "third forward", "loader", "posterior", "likelihood"])
def test_the_model_is_as_before_whatever_happens(
    model: Sums, path: str, where: str, error: type[BaseException]
) -> None:
    before = state(mixed_modes(model))
    q: Posterior = spread(model)
    inputs: Any = normals(20, 3)
    likelihood: tb.Likelihood = tb.Categorical()
    if "forward" in where:
        calls = 0

        def fail(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if where == "forward" or calls >= 3:
                raise error("stop")
            return x

        model.drop.forward = fail  # type: ignore[method-assign, assignment]
    elif where == "loader":

        def loader() -> Iterator[Tensor]:
            yield normals(4, 3)
            raise error("stop")

        inputs = loader()
    elif where == "posterior":

        class Broken(tb.Point):
            def draws(self, *_: Any, **__: Any) -> Iterator[tb.Weights]:
                yield self.mean()
                raise error("stop")

        q = Broken(tb.snapshot(model))
    else:

        class Refuses(tb.Categorical):
            def predictive(self, outputs: Tensor) -> tb.ClassPredictive:
                raise error("stop")

        likelihood = Refuses()
    with pytest.raises(error):
        tb.predictive(model, q, inputs, samples=3, likelihood=likelihood)
    assert_as_before(model, before)


def test_a_module_that_writes_to_its_buffers_writes_to_copies(path: str) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # in place, even in evaluation mode
            out = super().forward(x)
            self.last = out.mean(0)
            return out

    model = Counts()
    before = state(model)
    only_parameters = tb.Gaussian(
        {name: p for name, p in model.named_parameters()},
        {name: torch.ones_like(p) for name, p in model.named_parameters()},
    )
    tb.predictive(model, only_parameters, normals(5, 3), samples=4)
    assert_as_before(model, before)


@pytest.mark.parametrize("kind", [tb.Samples, tb.Point])
def test_a_module_that_writes_to_its_weights_does_not_write_to_the_posterior(
    path: str, kind: type[Posterior]
) -> None:
    class Shrinks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    model, x = Shrinks(3, 2), normals(5, 3)
    q: Posterior = tb.Point(tb.snapshot(model))
    if kind is tb.Samples:
        q = tb.Samples(model)
        for _ in range(3):
            q.append()
    before = q.mean()
    p = tb.predictive(model, q, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in q.mean().items())
    if path != "vmap":
        halved = before | {"weight": before["weight"] / 2}
        torch.testing.assert_close(
            p.probs, functional_call(nn.Linear(3, 2), halved, (x,)).softmax(1)
        )


@pytest.mark.parametrize("kind", [tb.Samples, tb.Point, tb.Gaussian])
def test_a_posterior_that_draws_in_its_own_way_is_asked(kind: type[Posterior], path: str) -> None:
    model, x = nn.Linear(3, 2), normals(5, 3)
    drawn = {name: torch.ones_like(tensor) for name, tensor in tb.snapshot(model).items()}

    class Own(kind):  # type: ignore[valid-type, misc]
        def sample(self, generator: torch.Generator | None = None) -> tb.Weights:
            return {name: tensor.clone() for name, tensor in drawn.items()}

        def draws(
            self, count: int, generator: torch.Generator | None = None
        ) -> Iterator[tb.Weights]:
            return (self.sample(generator) for _ in range(count))

    q = Own(*{tb.Samples: (model,), tb.Point: (drawn,), tb.Gaussian: (drawn, drawn)}[kind])  # type: ignore[index]
    if kind is tb.Samples:
        q.append()
    p = tb.predictive(model, q, x, samples=3)
    assert p.draws == 3
    torch.testing.assert_close(p.probs, functional_call(model, drawn, (x,)).softmax(1).detach())


def test_train_mode_does_not_matter(model: Sums) -> None:
    x, q = normals(20, 3), spread(model)
    training = tb.predictive(model.train(), q, x, samples=3, generator=seeded())
    evaluating = tb.predictive(model.eval(), q, x, samples=3, generator=seeded())
    assert torch.equal(training.probs, evaluating.probs)


def test_randomness_comes_from_the_generator_alone(model: Sums, path: str) -> None:
    q, x = spread(model), normals(20, 3)
    before = torch.get_rng_state()
    generator = seeded(1)
    one = tb.predictive(model, q, x, samples=3, generator=generator)
    two = tb.predictive(model, q, x, samples=3, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one.probs, two.probs)  # the generator moves on
    again = tb.predictive(model, q, x, samples=3, generator=seeded(1))
    assert torch.equal(one.probs, again.probs)
    torch.manual_seed(3)
    first = tb.predictive(model, q, x, samples=3)
    second = tb.predictive(model, q, x, samples=3)
    torch.manual_seed(3)
    assert torch.equal(first.probs, tb.predictive(model, q, x, samples=3).probs)
    assert not torch.equal(first.probs, second.probs)


# -- Wrong arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, -1])
def test_no_draws(model: Sums, samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples is {samples}: expected at least 1"):
        tb.predictive(model, spread(model), normals(2, 3), samples=samples)


@pytest.mark.parametrize("inputs", [torch.zeros(0, 3), [], iter(()), [torch.zeros(0, 3)] * 2])
def test_no_examples(model: Sums, inputs: Any) -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        tb.predictive(model, spread(model), inputs)
    assert model.sizes == []


def test_a_posterior_of_another_model(model: Sums) -> None:
    for other, message in (
        (nn.Linear(3, 4), "'weight' that Sums does not have"),
        (nn.Sequential(nn.Linear(3, 4)), "a Sequential has a weight '0.weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            tb.predictive(model, spread(other), normals(2, 3))


def test_outputs_that_cannot_be_averaged() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    class Pooled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(0)

    for model, error, message in (
        (Pair(3, 2), TypeError, "Pair returns a tuple"),
        (Pooled(3, 2), ValueError, r"Pooled returns shape \(2,\) for 5 examples"),
    ):
        with pytest.raises(error, match=message):
            tb.predictive(model, spread(model), normals(5, 3))


def test_losses_as_likelihoods(model: Sums) -> None:
    q, x = spread(model), normals(4, 3)
    given = tb.predictive(model, q, x, 3, nn.CrossEntropyLoss(), seeded())  # type: ignore[arg-type]
    assert torch.equal(given.probs, tb.predictive(model, q, x, 3, generator=seeded()).probs)
    with pytest.raises(ValueError, match="GaussianNoise"):
        tb.predictive(model, q, x, likelihood=nn.MSELoss())  # type: ignore[arg-type]
    single = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="GaussianNoise"):
        tb.predictive(single, spread(single), x)


def test_inputs_that_are_no_tensors(model: Sums) -> None:
    with pytest.raises(TypeError, match="not str"):
        tb.predictive(model, spread(model), "a path")
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        tb.predictive(model, spread(model), torch.tensor(1.0))


# -- Batch norm ---------------------------------------------------------------------------------------


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm1 = nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3, eps=1e-3)
        self.drop = nn.Dropout(0.5)
        self.b, self.norm2 = nn.Linear(5, 2), nn.BatchNorm1d(2)
        self.unused = nn.BatchNorm1d(7)
        self.stateless = nn.BatchNorm1d(5, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.b(self.drop(self.norm1(self.a(x)))))
        return out


def statistics(batches: Iterable[Tensor], weights: tb.Weights) -> dict[str, np.ndarray]:
    """Cumulative averages by hand; torch normalises by the biased and keeps the unbiased variance."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    sums: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for x in batches:
        h = x.double().numpy() @ w["a.weight"].T + w["a.bias"]
        sums["norm1.running_mean"].append(h.mean(0))
        sums["norm1.running_var"].append(h.var(0, ddof=1))
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-3) * w["norm1.weight"] + w["norm1.bias"]
        h = h @ w["b.weight"].T + w["b.bias"]
        sums["norm2.running_mean"].append(h.mean(0))
        sums["norm2.running_var"].append(h.var(0, ddof=1))
    return {name: np.mean(values, axis=0) for name, values in sums.items()}


BATCHES = [normals(12, 3, seed=s) * (s + 1) + s for s in range(4)] + [normals(5, 3, seed=9)]


@pytest.mark.parametrize(
    "loader",
    [
        BATCHES,
        [(x, torch.zeros(len(x))) for x in BATCHES],
        [{"x": x, "label": torch.zeros(len(x))} for x in BATCHES],
        iter(BATCHES),
    ],
    ids=["tensors", "pairs", "dicts", "iterator"],
)
def test_statistics_are_cumulative_averages(loader: Iterable[Any]) -> None:
    torch.manual_seed(0)
    model = TwoNorms()
    model.train()
    model.norm2.eval()
    draw = spread(model).sample(seeded())
    draw["norm1.running_mean"] += 100  # stale statistics of the draw have no part in it
    draw["unused.running_mean"] += 3
    before, momentum = state(model), (model.norm1.momentum, model.norm2.momentum)
    given = {name: tensor.clone() for name, tensor in draw.items()}
    new = tb.recalibrate_batchnorm(model, draw, loader)
    for name, truth in statistics(BATCHES, draw).items():
        np.testing.assert_allclose(new[name], truth, rtol=2e-4, atol=1e-5, err_msg=name)
    assert new["norm1.num_batches_tracked"] == 5
    assert_as_before(model, before)
    assert (model.norm1.momentum, model.norm2.momentum) == momentum
    # Nothing else changes, neither in the result nor in what was given.
    norms = {f"norm{i}.{n}" for i in (1, 2) for n in model.norm1._buffers}
    assert new.keys() == draw.keys()
    assert all(torch.equal(draw[n], tensor) for n, tensor in given.items())
    assert all(torch.equal(new[n], given[n]) for n in given.keys() - norms)


def test_statistics_of_images_under_new_weights_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    batches = [normals(6, 2, 6, 6, seed=s) for s in range(3)]
    weight = normals(3, 2, 3, 3, seed=7)
    new = tb.recalibrate_batchnorm(model, {"0.weight": weight}, batches)
    with torch.no_grad():
        maps = [torch.conv2d(x, weight, model[0].bias).numpy() for x in batches]
    means = np.mean([m.mean((0, 2, 3)) for m in maps], axis=0)
    variances = np.mean([m.var((0, 2, 3), ddof=1) for m in maps], axis=0)
    np.testing.assert_allclose(new["1.running_mean"], means, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(new["1.running_var"], variances, rtol=1e-4)


def test_with_the_new_statistics_predictions_are_sane() -> None:
    """The averaged weights' own statistics give outputs of mean 0 and variance 1 on the data."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = normals(1000, 3) * 5 + 2
    new = tb.recalibrate_batchnorm(model, tb.snapshot(model), x.split(100))
    out = functional_call(model.eval(), new, (x,)).detach()
    np.testing.assert_allclose(out.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(out.var(0), 1, atol=0.03)


def test_the_network_inside_a_wrapper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    net = tb.MCDropout(model, p=0.5).train()
    before = state(net)
    plain = tb.recalibrate_batchnorm(model, net.mean(), BATCHES)
    wrapped = tb.recalibrate_batchnorm(net, net.mean(), BATCHES)
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)  # dropout is off
    assert_as_before(net, before)


def test_without_batch_norm_the_weights_are_as_given() -> None:
    model = nn.Linear(2, 1)
    weights = tb.snapshot(model)
    same = tb.recalibrate_batchnorm(model, weights, [])
    assert same == weights
    assert same is not weights


def test_batch_norm_without_data() -> None:
    model = TwoNorms()
    before = state(model)
    for loader in ([], iter(())):
        with pytest.raises(ValueError, match="the loader has no batches"):
            tb.recalibrate_batchnorm(model, tb.snapshot(model), loader)
    assert_as_before(model, before)


def test_a_failing_loader_leaves_the_model_alone() -> None:
    def loader() -> Iterator[Tensor]:
        yield BATCHES[0]
        raise OSError("disk gone")

    model = TwoNorms().train()
    before = state(model)
    with pytest.raises(OSError, match="disk gone"):
        tb.recalibrate_batchnorm(model, tb.snapshot(model), loader())
    assert_as_before(model, before)
    assert model.norm1.momentum == 0.3


def test_a_module_that_stands_at_two_places_keeps_its_weights() -> None:
    """torch's functional_call does not put them back by itself."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    own, value = shared.weight, shared.weight.detach().clone()
    posterior = tb.Gaussian(tb.snapshot(model), {"0.weight": torch.ones(3, 3)})
    for samples in (1, 8):
        tb.predictive(model, posterior, torch.randn(4, 3), samples=samples)
        assert shared.weight is own
        assert torch.equal(shared.weight, value)


# -- Inputs that are passed whole ---------------------------------------------------------------------


class GraphNet(nn.Module):
    """Two graph convolutions: every node's output depends on all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(adjacency @ self.one(features))
        outputs: Tensor = adjacency @ self.two(hidden)
        return outputs


def test_a_graph_is_passed_whole() -> None:
    torch.manual_seed(0)
    net, features, adjacency = GraphNet(), torch.randn(7, 3), torch.rand(7, 7).softmax(1)
    posterior = tb.Samples(net)
    logits = []
    for _ in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.normal_()
            logits.append(net(features, adjacency))
        posterior.append()
    found = tb.predictive(net, posterior, (features, adjacency), split=False)
    assert isinstance(found, tb.ClassPredictive)
    torch.testing.assert_close(found.probs, torch.stack(logits).softmax(-1).mean(0))
    loader = [((features, adjacency), None), ((features, adjacency), None)]
    twice = tb.predictive(net, posterior, loader, split=False)
    assert len(twice) == 14
    with pytest.raises(RuntimeError, match=r"first example of these inputs alone.*split=False"):
        tb.predictive(net, posterior, (features, adjacency))


def test_outputs_of_whole_inputs_may_have_another_length() -> None:
    """One output for a whole set, as a network that pools a graph gives."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).mean(0, keepdim=True)

    net = Pool()
    point = tb.Point(tb.snapshot(net))
    assert len(tb.predictive(net, point, torch.randn(5, 3), split=False)) == 1
    with pytest.raises(ValueError, match=r"for 5 examples.*split=False"):
        tb.predictive(net, point, torch.randn(5, 3))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("head", [True, False], ids=["last layer", "all weights"])
@pytest.mark.parametrize("serve", [False, True])
def test_a_network_that_writes_to_its_inputs_writes_to_copies(
    path: str, split: bool, head: bool, serve: bool
) -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.last(self.body(x.sub_(1)).tanh())
            return logits

    torch.manual_seed(0)
    model, x = Centres(), normals(6, 3)
    q = spread(model)
    if head:
        q = tb.Gaussian(tb.snapshot(model), {"last.weight": torch.ones(4, 5)})
    before, expected = x.clone(), by_hand_on_copies(model, q, x)
    if serve:
        p = tb.Predictor(model, q, 5, generator=seeded(5), split=split)(x)
    else:
        p = tb.predictive(model, q, x, samples=5, generator=seeded(5), split=split)
    assert torch.equal(x, before)
    torch.testing.assert_close(p.probs, expected)


def by_hand_on_copies(model: nn.Module, posterior: Posterior, x: Tensor) -> Tensor:
    draws = posterior.draws(5, seeded(5))
    with torch.no_grad():
        each = [functional_call(model, draw, (x.clone(),)).softmax(1) for draw in draws]
    return torch.stack(each).mean(0)
