"""Data as people have them: loaders, arrays, data frames and streams, in `fit` and in predictions."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torchbayes as tb
from torchbayes.data import BatchLoader, ForeignLoader

from ..processes import processes
from ..stopping import StopAfter, Stopped

SIZE = 96
QUIET: dict[str, Any] = {"epochs": 2, "progress": False, "lr": 0.01}


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SIZE, 4, generator=generator)
    return inputs, (inputs[:, 0] + 0.3 * inputs[:, 1] > 0).long()


X, Y = problem()
DATA = TensorDataset(X, Y)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def same(one: tb.Run, two: tb.Run) -> bool:
    mean = two.posterior.mean()
    return all(torch.equal(tensor, mean[name]) for name, tensor in one.posterior.mean().items())


class Noisy(Dataset[Any]):
    """Augments with all three global generators, as transforms do."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(4) + float(np.random.randn()) + random.gauss(0, 1)
        return X[index] + 0.1 * noise, int(Y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


class Reversed(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int = SIZE) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's own: five of the batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(8 * i, 8 * i + 8)) for i in range(5)])

    def __len__(self) -> int:
        return 5


def batches_from(count: int = SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, count, 16):
        yield X[start : start + 16], Y[start : start + 16]


# -- Loaders ------------------------------------------------------------------------------------------


def test_the_batches_of_a_loader_are_used_as_they_are() -> None:
    """Own sampler, collate function and drop_last, against an ordinary loop over the same loader."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]) / 2, torch.stack([y for _, y in rows])

    loader = DataLoader(
        Subset(DATA, range(90)), 16, sampler=Reversed(90), collate_fn=collate, drop_last=True
    )
    run = tb.fit(made(), loader, "mle", epochs=2, lr=0.01, progress=False)
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    assert steps == 10  # drop_last
    mean = run.posterior.mean()
    assert all(torch.equal(p, mean[name]) for name, p in model.named_parameters())


def test_every_epoch_has_an_order_of_its_own_that_depends_on_the_seed_alone() -> None:
    loader = DataLoader(TensorDataset(X, torch.arange(SIZE)), 10, shuffle=True)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        ours = ForeignLoader(loader, seed=seed)
        orders.append(torch.cat([targets for _, targets in ours.batches(epoch)]).tolist())
        torch.rand(3)  # no part of what decides the order
    assert all(sorted(order) == list(range(SIZE)) for order in orders)
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_reading_a_loader_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for _ in ForeignLoader(DataLoader(Noisy(), 10, shuffle=True), seed=0).batches(0):
        pass
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(DATA, 16, shuffle=True),
    "generator": lambda: DataLoader(DATA, 16, shuffle=True, generator=torch.Generator()),
    "augmented": lambda: DataLoader(Noisy(), 16, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 16, shuffle=True, num_workers=2),
    "weighted": lambda: DataLoader(
        DATA, 16, sampler=WeightedRandomSampler(torch.linspace(1, 2, SIZE).tolist(), 80)
    ),
    "subset": lambda: DataLoader(
        DATA, 16, sampler=SubsetRandomSampler(range(80), generator=torch.Generator())
    ),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, replacement=True), 16, True)
    ),
    "stream": lambda: Stream(),
    "function": lambda: batches_from,
}


@pytest.mark.filterwarnings("ignore:the resumed run may differ")
@pytest.mark.parametrize("kind", list(LOADERS))
def test_a_run_resumes_bit_equal_in_the_middle_of_an_epoch(kind: str, tmp_path: Path) -> None:
    """With a network that has dropout: its random numbers are not mixed up with the loader's."""
    size = SIZE if kind in ("stream", "function") else None
    settings = {**QUIET, "batch_size": 16, "train_size": size, "validation": DataLoader(DATA, 50)}
    whole = tb.fit(network, LOADERS[kind](), "map", **settings)
    stopped = {**settings, "progress": StopAfter(8), "folder": tmp_path, "checkpoint_seconds": 0}
    with pytest.raises(Stopped):
        tb.fit(network, LOADERS[kind](), "map", **stopped)
    resumed = tb.fit(network, LOADERS[kind](), "map", **settings, folder=tmp_path, resume=True)
    assert same(whole, resumed)
    assert whole.history[-1]["validation_nll"] == resumed.history[-1]["validation_nll"]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(DATA, 16, sampler=Reversed()), "a sampler of your own, Reversed"),
        (lambda: DataLoader(Stream(), 16), "an iterable data set, Stream"),
        (lambda: batches_from, "function 'batches_from'"),
        (
            lambda: DataLoader(DATA, 16, num_workers=1, persistent_workers=True),
            "persistent workers",
        ),
        (lambda: DataLoader(DATA, 16, shuffle=True), None),
        (lambda: DataLoader(DATA, 16, sampler=DistributedSampler(DATA, 1, 0)), None),
    ],
)
def test_a_resumed_run_says_where_it_may_differ(
    loader: Callable[[], Any], why: str | None, tmp_path: Path
) -> None:
    settings = {**QUIET, "train_size": SIZE, "folder": tmp_path}
    with pytest.raises(Stopped):
        tb.fit(
            network, loader(), "map", **{**settings, "progress": StopAfter(2)}, checkpoint_seconds=0
        )
    expected = (
        contextlib.nullcontext()
        if why is None
        else pytest.warns(UserWarning, match=f"the resumed run may differ .*{why}")
    )
    with expected:
        tb.fit(network, loader(), "map", **settings, resume=True)


@pytest.mark.parametrize(
    ("loader", "size", "steps"),
    [
        (lambda: DataLoader(DATA, 20), SIZE, 5),
        (lambda: DataLoader(DATA, 20, drop_last=True), SIZE, 4),
        (lambda: DataLoader(DATA, 20, sampler=RandomSampler(DATA, num_samples=40)), SIZE, 2),
        (lambda: DataLoader(DATA, 20, sampler=SubsetRandomSampler(range(60))), 60, 3),
        (lambda: DataLoader(Subset(DATA, range(50)), 20), 50, 3),
        (lambda: DataLoader(DATA, 20, sampler=Reversed()), SIZE, 5),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 30, False)),
         SIZE, 4),
    ],
)  # fmt: skip
def test_the_training_set_is_counted(loader: Callable[[], Any], size: int, steps: int) -> None:
    ours = ForeignLoader(loader(), seed=0)
    assert (ours.num_examples, len(ours), len(list(ours.batches(0)))) == (size, steps, steps)


@pytest.mark.parametrize(
    "data",
    [
        Stream(),
        DataLoader(Stream(), 16),
        batches_from,
        DataLoader(DATA, 16, sampler=Reversed(40)),
        DataLoader(TensorDataset(X.view(6, 16, 4), Y.view(6, 16)), batch_size=None),
    ],
)
def test_what_cannot_be_counted_needs_train_size(data: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot tell how many training examples.*train_size="):
        tb.fit(network, data, **QUIET)
    run = tb.fit(network, data, **QUIET, batch_size=16, train_size=SIZE)
    assert len(run.history) == 2


def test_a_stream_equals_the_same_data_in_memory() -> None:
    ordered = BatchLoader(X, Y, 16, shuffle=False, seed=0)
    expected = tb.fit(made(), ordered, "vogn", epochs=3, progress=False)
    for data in (Stream(), batches_from, DataLoader(Stream(), 16), DataLoader(DATA, 16)):
        run = tb.fit(made(), data, "vogn", epochs=3, batch_size=16, train_size=SIZE, progress=False)
        assert same(expected, run)


def test_a_stream_of_another_length_is_not_silent() -> None:
    with pytest.warns(UserWarning, match=r"ended after 6 of the 12 batches .* check train_size"):
        tb.fit(network, Stream(), **QUIET, batch_size=16, train_size=2 * SIZE)
    with pytest.warns(UserWarning, match=r"goes on after the 3 batches .* see train_size"):
        tb.fit(network, Stream(), **QUIET, batch_size=16, train_size=SIZE // 2)
    with pytest.warns(UserWarning, match=r"has 40 examples, but its data set 96"):
        tb.fit(network, DataLoader(DATA, batch_sampler=Buckets()), **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.fit(network, DataLoader(DATA, batch_sampler=Buckets()), **QUIET, train_size=40)


def test_an_iterator_can_be_read_only_once() -> None:
    with pytest.raises(TypeError, match="a generator can be read only once"):
        tb.fit(network, batches_from(), **QUIET, train_size=SIZE)


def test_the_transform_is_applied_to_the_batches_of_a_loader() -> None:
    scaled = tb.fit(made(), DataLoader(TensorDataset(3 * X, Y), 16), **QUIET)
    run = tb.fit(made(), DataLoader(DATA, 16), transform=lambda x, _: 3 * x, **QUIET)
    assert same(scaled, run)


@pytest.mark.parametrize("method", ["swag", "ensemble", "sgld", "bbb", "ivon"])
def test_methods_of_every_family_take_a_loader(method: str) -> None:
    options = {"members": 2} if method == "ensemble" else {}
    loader = DataLoader(DATA, 16, shuffle=True)
    run = tb.fit(network, loader, method, epochs=2, progress=False, **options)
    assert run.predict(DataLoader(DATA, 16), samples=2).probs.shape == (SIZE, 2)


def in_processes(folder: str) -> None:
    from torch.distributed import get_rank, init_process_group

    init_process_group("gloo")
    plain = DataLoader(DATA, 24, shuffle=True)
    split = DataLoader(DATA, 12, sampler=DistributedSampler(DATA, shuffle=False))
    for kind, data in (("plain", plain), ("distributed", split)):
        run = tb.fit(made(), data, "map", **QUIET)
        if get_rank() == 0:
            run.posterior.save(Path(folder) / kind)
    for method, data, message in (
        ("sgld", split, "here every process needs all of them: leave the sampler out"),
        ("map", DataLoader(DATA, 24, sampler=Reversed()), "sampler=DistributedSampler"),
    ):
        with pytest.raises(ValueError, match=message):
            tb.fit(made(), data, method, epochs=1, progress=False)


def test_two_processes_share_a_loader(tmp_path: Path) -> None:
    """They see together what one process sees; the sums of gradients differ by rounding."""
    done = processes(2, in_processes, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for kind in ("plain", "distributed"):
        alone = tb.fit(made(), DataLoader(DATA, 24, shuffle=kind == "plain"), "map", **QUIET)
        other = tb.load(tmp_path / kind).mean()
        for name, tensor in alone.posterior.mean().items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


# -- Arrays, data frames and spellings ----------------------------------------------------------------


def test_arrays_and_both_spellings_equal_a_pair_of_tensors() -> None:
    expected = tb.fit(made(), (X, Y), "vogn", epochs=2, progress=False)
    x, y = X.numpy(), Y.numpy()
    read_only = x.copy()
    read_only.flags.writeable = False
    settings = {"epochs": 2, "progress": False}
    for run in (
        tb.fit(made(), (x, y), "vogn", **settings),
        tb.fit(made(), X, Y, "vogn", **settings),
        tb.fit(made(), x.astype(np.float64), y, method="vogn", **settings),
        tb.fit(made(), read_only, y.tolist(), "vogn", **settings),
        tb.fit(made(), [x, y], "vogn", **settings),
        tb.fit(made(), {"input": x, "labels": y}, "vogn", **settings),
        tb.fit(made(), np.flip(np.flip(x).copy()), y.astype(">i4"), "vogn", **settings),
    ):
        assert same(expected, run)
    with pytest.raises(ValueError, match="given twice, 'vogn' and 'ivon'"):
        tb.fit(made(), (X, Y), "vogn", method="ivon")
    with pytest.raises(TypeError, match="the third argument of fit is a VOGN"):
        tb.fit(made(), (X, Y), tb.VOGN)


def test_data_frames_and_series() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.double().numpy(), columns=list("abcd"))
    frame["c"], frame["d"] = frame["c"] > 0, (10 * frame["d"]).astype(int)  # mixed types
    numbers = torch.from_numpy(frame.to_numpy(dtype=np.float32))
    expected = tb.fit(made(), numbers, Y, **QUIET, validation=(numbers, Y))
    labels = pandas.Series(Y.numpy(), index=range(7, 7 + SIZE))
    run = tb.fit(made(), frame, labels, **QUIET, validation=(frame, labels))
    assert same(expected, run)
    torch.testing.assert_close(run.predict(frame).probs, expected.predict(numbers).probs)
    for x, y, message in (
        (frame.assign(b="x"), labels, "column 'b' of the inputs is not numeric"),
        (frame, labels.map({0: "no", 1: "yes"}), "the targets are .* number the classes from 0"),
        (frame, labels.astype(object), "the targets are of type object"),
    ):
        with pytest.raises(TypeError, match=message):
            tb.fit(made(), x, y, **QUIET)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    expected = tb.fit(made(), DataLoader(DATA, 16), **QUIET)
    loader = DataLoader(TensorDataset(X, Y.to(dtype)), 16)
    assert same(expected, tb.fit(made(), loader, **QUIET, validation=loader))
    assert same(tb.fit(made(), (X, Y), **QUIET), tb.fit(made(), (X, Y.to(dtype)), **QUIET))


def test_double_numbers_suit_the_network() -> None:
    class Doubles(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return X[index].double().numpy(), np.int32(Y[index])

    expected = tb.fit(made(), (X, Y), **QUIET)
    run = tb.fit(made(), Doubles(), **QUIET, validation=Doubles())
    assert same(expected, run)
    assert torch.equal(run.predict(Doubles()).probs, expected.predict(X).probs)
    precise = tb.fit(made().double(), (X, Y), **QUIET)  # and the other way round
    assert precise.predict(X).probs.dtype is torch.float64


def test_predictions_take_what_training_takes() -> None:
    run = tb.fit(made(), (X, Y), "ensemble", members=2, epochs=1, progress=False)
    expected = run.predict(X).probs
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for inputs in (X.double().numpy(), DATA, Stream(), DataLoader(DATA, 40), [X[:50], X[50:]]):
        torch.testing.assert_close(run.predict(inputs).probs, expected)
    with pytest.warns(UserWarning, match="the DataLoader shuffles, .* shuffle=False"):
        run.predict(DataLoader(DATA, 40, shuffle=True))
    given = torch.Generator().manual_seed(0)
    torch.set_rng_state(state)
    run.predict(DATA, generator=given)
    assert torch.equal(torch.get_rng_state(), state)


HOT = F.one_hot(Y)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((X, HOT), {}, r"shape \(96, 2\), .* pass targets.argmax\(1\)"),
        ((X, HOT.float()), {}, r"look like one-hot classes: pass targets.argmax\(1\)"),
        ((X, HOT.float()), {"likelihood": tb.Categorical()}, r"pass targets.argmax\(1\)"),
        ((X, Y[:, None]), {}, r"shape \(96, 1\), .* pass targets\[:, 0\]"),
        ((X, Y), {"device": "cuda:7"}, "device is 'cuda:7', which this torch cannot use"),
        ((X, Y), {"device": "gpu"}, "device is 'gpu', which this torch cannot use"),
        ((X, Y), {"train_size": 0}, "train_size is 0"),
        ((X.long(), Y), {}, "the inputs are int64; convert them to float32"),
        ((TensorDataset(X, X, Y),), {}, "the data are 3 parts"),
        (({"x": X},), {}, "the data have no targets among 'x'"),
        (([(X[:9], Y[0]), (X[:7], Y[1])],), {}, "cannot be put into one batch .* collate_fn"),
        ((X, Y[:5]), {}, "96 inputs but 5 targets"),
        (((X, Y),), {"validation": DataLoader(X, 10)}, "the validation set has no targets"),
    ],
)
def test_data_and_settings_that_do_not_fit_get_one_sentence(
    arguments: tuple[Any, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tb.fit(made(), *arguments, **{**QUIET, **settings})
    assert "\n" not in str(caught.value)


def test_types_that_do_not_fit_get_one_sentence() -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(made().parameters()), 9)
    for settings, message in (
        ({"schedule": scheduler}, 'schedule is a CosineAnnealingLR, .* "cosine"'),
        ({"schedule": type(scheduler)}, "schedule is a CosineAnnealingLR"),
    ):
        with pytest.raises(TypeError, match=message):
            tb.fit(made(), (X, Y), **QUIET, **settings)
    for data in ("table.csv", X, X.numpy(), None):
        with pytest.raises(TypeError, match=f"cannot train on a {type(data).__name__}"):
            tb.fit(made(), data, **QUIET)
