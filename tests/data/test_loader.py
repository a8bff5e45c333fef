from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbayes.data import BatchLoader, Chain, Normalise, PadCropFlip
from torchbayes.data.order import mixed_seed, share

AUGMENT = Chain(PadCropFlip(2), Normalise((0.5,), (0.25,)))


def loader(count: int = 50, batch_size: int = 8, **settings_: object) -> BatchLoader:
    images = torch.randint(0, 256, (count, 1, 6, 6), generator=torch.Generator().manual_seed(0))
    options = {"shuffle": True, "seed": 3, "transform": AUGMENT} | settings_
    return BatchLoader(images.to(torch.uint8), torch.arange(count), batch_size, **options)


def equal(left: list, right: list) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("start", [0, 1, 3, 6, 7])
def test_resuming_gives_the_tail_of_the_epoch_bit_for_bit(start: int) -> None:
    whole = list(loader().batches(4))
    assert len(whole) == 7
    assert equal(list(loader().batches(4, start)), whole[start:])


def test_epochs_seeds_and_ranks_differ() -> None:
    first = [y for _, y in loader().batches(0)]
    assert not torch.equal(torch.cat(first), torch.cat([y for _, y in loader().batches(1)]))
    assert not torch.equal(torch.cat(first), torch.cat([y for _, y in loader(seed=4).batches(0)]))
    assert sorted(torch.cat(first).tolist()) == list(range(50))


def test_augmentation_is_another_one_each_epoch_and_batch() -> None:
    still = {"shuffle": False, "transform": PadCropFlip(2)}
    one = torch.cat([x for x, _ in loader(**still).batches(0)])
    two = torch.cat([x for x, _ in loader(**still).batches(1)])
    assert (one != two).flatten(1).any(1).float().mean() > 0.8
    same = BatchLoader(torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).repeat(16, 1, 1, 1),
                       None, 8, shuffle=False, seed=0, transform=PadCropFlip(2))  # fmt: skip
    (left, _), (right, _) = same.batches(0)
    assert not torch.equal(left, right)


def test_iterating_advances_the_epoch() -> None:
    iterated = loader()
    assert equal(list(iterated), list(loader().batches(0)))
    assert equal(list(iterated), list(loader().batches(1)))
    assert len(iterated) == 7
    assert iterated.num_examples == 50


def test_batches_hold_the_right_pairs_and_leave_global_randomness_alone() -> None:
    before = torch.get_rng_state()
    plain = loader(transform=None)
    for inputs, targets in plain.batches(2):
        assert torch.equal(inputs, plain.inputs[targets])
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_may_be_tuples_and_dicts_and_targets_absent() -> None:
    x = torch.arange(10)
    nested = BatchLoader({"a": x, "b": (x, -x)}, None, 4, shuffle=True, seed=0)
    for inputs, targets in nested:
        assert targets is None
        assert torch.equal(inputs["a"], inputs["b"][0])
        assert torch.equal(inputs["a"], -inputs["b"][1])


def test_without_shuffling_the_order_is_the_data_sets_and_drop_last_drops() -> None:
    ordered = loader(shuffle=False, drop_last=True)
    assert torch.cat([y for _, y in ordered]).tolist() == list(range(48))
    assert len(ordered) == 6


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_ranks_share_every_global_batch(
    count: int, batch_size: int, world_size: int, epoch: int, drop_last: bool
) -> None:
    if batch_size < world_size or (drop_last and batch_size > count):
        return
    options = {"shuffle": True, "seed": 7, "drop_last": drop_last}
    data = torch.arange(count)
    alone = list(BatchLoader(data, data, batch_size, **options).batches(epoch))
    ranks = [
        list(
            BatchLoader(data, data, batch_size, rank=r, world_size=world_size, **options).batches(
                epoch
            )
        )
        for r in range(world_size)
    ]
    assert all(len(batches) == len(alone) for batches in ranks)
    for number, (_, targets) in enumerate(alone):
        shares = [batches[number][1] for batches in ranks]
        assert torch.equal(torch.cat(shares), targets)
        sizes = [len(part) for part in shares]
        assert max(sizes) - min(sizes) <= 1


@given(count=st.integers(0, 1000), world_size=st.integers(1, 50))
def test_shares_are_a_partition(count: int, world_size: int) -> None:
    parts = [share(count, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(parts))


def test_ranks_augment_differently() -> None:
    images = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).repeat(16, 1, 1, 1)
    parts = [
        next(
            iter(
                BatchLoader(
                    images,
                    None,
                    16,
                    shuffle=False,
                    seed=0,
                    transform=PadCropFlip(2),
                    rank=rank,
                    world_size=2,
                )
            )
        )[0]
        for rank in range(2)
    ]
    assert parts[0].shape == parts[1].shape
    assert not torch.equal(*parts)


def test_mixed_seeds_of_neighbouring_keys_do_not_collide() -> None:
    seeds = {mixed_seed(0, a, b) for a in range(40) for b in range(40)}
    assert len(seeds) == 1600


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"batch_size": 2, "world_size": 3}, "3 processes cannot share"),
        ({"batch_size": 51, "drop_last": True}, "leaves no batch"),
        ({"count": 0}, "at least one example"),
    ],
)
def test_impossible_loaders_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        loader(**options)


def test_impossible_positions_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="start is 8"):
        loader().batches(0, 8)
    with pytest.raises(ValueError, match="epoch is -1"):
        loader().batches(-1)
    with pytest.raises(ValueError, match="5 inputs but 4 targets"):
        BatchLoader(torch.zeros(5), torch.zeros(4), 2, shuffle=False, seed=0)
