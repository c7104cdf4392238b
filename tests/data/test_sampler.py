"""Shards are a partition of the data set, by every rule and in every epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from instep.data.sampler import SHARDS, ShardSampler, contiguous, strided

few = settings(deadline=None, max_examples=50)


@few
@given(num_samples=st.integers(0, 500), world_size=st.integers(1, 40), shards=st.sampled_from(sorted(SHARDS)))
def test_shards_are_a_partition_and_differ_by_at_most_one(
    num_samples: int, world_size: int, shards: str
) -> None:
    parts = [SHARDS[shards](num_samples, rank, world_size) for rank in range(world_size)]
    assert sorted(sample for part in parts for sample in part) == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shards_look_as_drawn() -> None:
    assert [list(contiguous(8, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert [list(strided(8, rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@few
@given(
    num_samples=st.integers(0, 200),
    world_size=st.integers(1, 8),
    shards=st.sampled_from(sorted(SHARDS)),
    shuffle=st.booleans(),
)
def test_in_every_epoch_the_ranks_see_each_sample_once(
    num_samples: int, world_size: int, shards: str, shuffle: bool
) -> None:
    ranks = [
        ShardSampler(num_samples, rank, world_size, shards=shards, shuffle=shuffle, seed=3)
        for rank in range(world_size)
    ]
    for _ in range(3):
        seen = [list(sampler) for sampler in ranks]
        assert [len(samples) for samples in seen] == [len(sampler) for sampler in ranks]
        assert sorted(sample for samples in seen for sample in samples) == list(range(num_samples))


def test_each_iter_is_the_next_epoch_without_set_epoch() -> None:
    sampler = ShardSampler(100, 0, 2)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second


def test_an_epoch_that_is_left_early_still_counts() -> None:
    left, read = ShardSampler(100, 1, 2), ShardSampler(100, 1, 2)
    next(iter(left))
    list(read)
    assert list(left) == list(read)


def test_without_shuffle_the_shard_comes_in_order() -> None:
    assert list(ShardSampler(7, 1, 2, shuffle=False)) == [1, 3, 5]
    assert list(ShardSampler(7, 1, 2, shuffle=False, shards="contiguous")) == [3, 4, 5, 6]


def test_a_torch_data_loader_takes_it_as_sampler() -> None:
    data = TensorDataset(torch.arange(10))
    loaders = [DataLoader(data, batch_size=2, sampler=ShardSampler(10, rank, 3)) for rank in range(3)]
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    seen = [int(sample) for loader in loaders for (batch,) in loader for sample in batch]
    assert sorted(seen) == list(range(10))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="contiguous, strided, got 'random'"):
        ShardSampler(10, 0, 2, shards="random")
    with pytest.raises(ValueError, match=r"rank < world_size\(2\), got 2"):
        contiguous(10, 2, 2)
    with pytest.raises(ValueError, match="world_size >= 1, got 0"):
        strided(10, 0, 0)
    with pytest.raises(ValueError, match="num_samples >= 0, got -1"):
        strided(-1, 0, 1)
    with pytest.raises(ValueError, match="epoch >= 0, got -1"):
        ShardSampler(10, 0, 2).set_epoch(-1)
