from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import torchbayes as tb
from torchbayes.data import (
    BatchLoader,
    Chain,
    DataError,
    Normalise,
    PadCropFlip,
    Split,
    StreamLoader,
    load_data,
    make_loader,
)
from torchbayes.data.stream import lost_worker

from ..processes import processes

# Two workers on a machine of one core are slow but right.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

AUGMENT = Chain(PadCropFlip(2), Normalise((0.5,), (0.25,)))


class Counted:
    """A data set that remembers what was read and draws from all global generators."""

    def __init__(self, noise: bool = False) -> None:
        self.read: list[int] = []
        self.noise = noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        drawn = torch.rand(1).item() + np.random.rand() + random.random() if self.noise else 0.0
        return torch.tensor([index + drawn], dtype=torch.float64), index


class Killed(Counted):
    """A data set whose worker process dies at example 13."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 13 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def split() -> Split:
    images = torch.randint(0, 256, (21, 1, 6, 6), generator=torch.Generator().manual_seed(0))
    return Split(images.to(torch.uint8), torch.arange(21))


def assert_equal(left: list, right: list) -> None:
    assert len(left) == len(right)
    for (a, b), (c, d) in zip(left, right, strict=True):
        assert a.dtype == c.dtype
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_equals_the_loader_in_memory(workers: int) -> None:
    data, options = split(), {"shuffle": True, "seed": 5, "transform": AUGMENT}
    memory = BatchLoader(data.inputs, data.targets, 4, **options)
    stream = StreamLoader(data, 4, workers=workers, **options)
    assert len(stream) == len(memory) == 6
    assert_equal(list(stream.batches(1)), list(memory.batches(1)))
    assert_equal(list(stream.batches(2, 4)), list(memory.batches(2, 4)))


def test_the_shares_of_ranks_equal_those_in_memory_and_may_be_empty() -> None:
    data, options = split(), {"shuffle": True, "seed": 5, "transform": AUGMENT}
    for rank in range(2):
        place = {"rank": rank, "world_size": 2}
        memory = list(BatchLoader(data.inputs, data.targets, 4, **options, **place).batches(0))
        assert_equal(list(StreamLoader(data, 4, workers=0, **options, **place).batches(0)), memory)
    assert {len(y) for _, y in memory} == {1, 2}
    last = list(StreamLoader(data, 4, workers=0, rank=0, world_size=2, **options).batches(0))[-1]
    assert last[0].shape == (0, 1, 6, 6)


def test_skipped_batches_are_not_read() -> None:
    data = Counted()
    loader = StreamLoader(data, 4, shuffle=True, seed=0, workers=0)
    tail = [y.tolist() for _, y in loader.batches(0, 3)]
    assert sorted(data.read) == sorted(i for batch in tail for i in batch)
    assert len(data.read) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_data_set_draws_depends_on_seed_epoch_and_example_only(workers: int) -> None:
    def drawn(seed: int, epoch: int, batch_size: int, workers: int) -> dict[int, float]:
        loader = StreamLoader(Counted(True), batch_size, shuffle=True, seed=seed, workers=workers)
        return {
            int(i): float(x)
            for xs, ys in loader.batches(epoch)
            for x, i in zip(xs, ys, strict=True)
        }

    reference = drawn(0, 0, 4, 0)
    assert drawn(0, 0, 7, workers) == reference
    assert len(set(x - i for i, x in reference.items())) == 20
    assert drawn(0, 1, 4, workers) != reference
    assert drawn(1, 0, 4, workers) != reference


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generators_are_left_as_they_were(workers: int) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(StreamLoader(Counted(True), 4, shuffle=True, seed=0, workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for number in range(10):
            pixels = rng.integers(0, 256, (12, 10, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_a_streamed_folder_trains_as_the_one_in_memory(photos: Path) -> None:
    streamed = load_data(f"folder:{photos}", stream=True)
    memory = load_data(f"folder:{photos}", stream=False)
    options = {"shuffle": True, "augment": True, "seed": 2}
    left = make_loader(streamed, streamed.train, 4, workers=2, **options)
    right = make_loader(memory, memory.train, 4, **options)
    assert isinstance(left, StreamLoader)
    assert isinstance(right, BatchLoader)
    assert_equal(list(left.batches(3)), list(right.batches(3)))


def test_random_crops_differ_by_epoch_and_survive_a_restart(photos: Path) -> None:
    data = load_data(f"folder:{photos}", stream=True).train.random_crops()
    options = {"shuffle": False, "seed": 0, "workers": 0}
    first = torch.cat([x for x, _ in StreamLoader(data, 4, **options).batches(0)])
    tail = torch.cat([x for x, _ in StreamLoader(data, 4, **options).batches(0, 2)])
    other = torch.cat([x for x, _ in StreamLoader(data, 4, **options).batches(1)])
    assert torch.equal(first[8:], tail)
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named_in_one_sentence(photos: Path, workers: int) -> None:
    data = load_data(f"folder:{photos}", stream=True)
    bad = data.train.path(7)
    bad.write_bytes(bad.read_bytes()[:60])
    loader = make_loader(data, data.train, 4, workers=workers)
    with pytest.raises(DataError, match=f"the image {bad} could not be read") as caught:
        list(loader)
    assert "\n" not in str(caught.value)


def test_an_unreadable_example_of_any_data_set_is_named() -> None:
    class Broken(Counted):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index == 5:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    with pytest.raises(
        DataError, match="example 5 of the data set could not be read: disk on fire"
    ):
        list(StreamLoader(Broken(), 4, shuffle=False, seed=0, workers=0))


def test_negative_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="workers is -1"):
        StreamLoader(Counted(), 4, shuffle=False, seed=0, workers=-1)


def fit_with_a_killed_worker(workers: int, own: bool) -> None:
    """What a process of its own does: torch's errors from signal handlers should meet no other test."""
    warnings.simplefilter("ignore")  # that there are fewer cores
    loader: Any = Killed()
    if own:
        loader = StreamLoader(loader, 2, shuffle=False, seed=0, workers=workers)
    else:
        loader = torch.utils.data.DataLoader(loader, 2, num_workers=workers)
    network = torch.nn.Linear(1, 20).double()
    for _ in range(2):  # the moment at which it is noticed varies
        try:
            tb.fit(network, loader, "map", train_size=20, epochs=1, progress=False)
        except DataError as error:
            print(error)


@pytest.mark.parametrize(
    ("workers", "own"), [(1, True), (2, False)], ids=["StreamLoader", "DataLoader"]
)
def test_a_killed_worker_is_one_sentence(workers: int, own: bool) -> None:
    ended = processes(1, fit_with_a_killed_worker, workers, own)
    assert ended.returncode == 0, ended.stderr
    told = ended.stdout.splitlines()
    assert len(told) == 2
    assert all(
        re.match(r"a process that reads the data has ended \(.*\): a system", t) for t in told
    )


def test_a_killed_worker_is_told_anywhere_in_an_epoch() -> None:
    """torch raises its error from a signal handler: while a step is computed, too."""
    loader = StreamLoader(Counted(), 2, shuffle=False, seed=0, workers=0)
    network = torch.nn.Linear(1, 20).double()

    def killed(*_: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    network.register_forward_hook(lambda *_: killed() if network.training else None)
    with pytest.raises(
        DataError, match=r"has ended \(DataLoader worker \(pid 7\) is killed by signal: Killed"
    ):
        tb.fit(network, loader, "map", train_size=20, epochs=1, progress=False, in_place=True)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset"), EOFError(), FileNotFoundError("x")]
)
def test_a_connection_of_the_data_s_own_is_no_worker(error: Exception) -> None:
    def fails(_: int) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        fails(0)
    assert lost_worker(caught.value) is None
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(EOFError) as broken:
        ours.recv()
    assert "has ended (EOFError)" in str(lost_worker(broken.value))
