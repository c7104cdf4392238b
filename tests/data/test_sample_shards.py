"""Samples in shards: each once per epoch, shards read from front to back, whoever reads and from wherever."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from instep.data.loader import Loader
from instep.data.sample_shards import ShardOrder
from tests.data.test_loader import read_step, whole

SIZES = [5, 0, 9, 7, 3, 11, 4, 8, 6, 10]


class Shelf:
    """Shards by number; counts how often each was opened, and how many samples were read."""

    def __init__(self, sizes: list[int] | None = None) -> None:
        self.sizes = SIZES if sizes is None else sizes
        self.opened: Counter[int] = Counter()
        self.num_read = 0

    def __call__(self, shard: int) -> Iterator[tuple[int, int]]:
        self.opened[shard] += 1
        for i in range(self.sizes[shard]):
            self.num_read += 1
            yield shard, i


def loader_of(open_shard: Any, **options: Any) -> Loader:
    options = {"sizes": SIZES, "batch_size": 8, "micro_batch_size": 2, "collate_fn": whole, **options}
    return Loader(range(len(SIZES)), open_shard=open_shard, **options)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_a_lane_reads_shards_from_front_to_back(drawn: st.DataObject) -> None:
    sizes = drawn.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
    micro_size, num_lanes = drawn.draw(st.integers(1, 3)), drawn.draw(st.integers(1, 4))
    batch_size = micro_size * num_lanes
    order = ShardOrder(sizes, batch_size=batch_size, micro_size=micro_size, seed=3, shuffle=True)
    num_samples, num_breaks = sum(sizes), 0
    positions = [p for p in range(num_samples) if p // micro_size % num_lanes == 0]  # of the first lane
    samples = order.samples_at(positions)
    begins = {sum(sizes[:i]) for i in range(len(sizes))}
    for one, following in pairwise(samples):
        num_breaks += following != one + 1
        assert following == one + 1 or following in begins
    assert num_breaks <= len(sizes) - 1


def test_an_epoch_opens_each_shard_once_or_twice_on_one_rank() -> None:
    shelf = Shelf()
    loader = loader_of(shelf)
    for _ in range(loader.num_steps(1) - 1):
        read_step(loader, 1)
    assert sorted(shelf.opened.values())[-2] <= 2  # but for the first sample, which ranks compare
    assert shelf.num_read < 1.5 * sum(SIZES)


def test_epochs_have_orders_of_their_own() -> None:
    loader = loader_of(Shelf(), batch_size=1, micro_batch_size=1)
    stream = [read_step(loader, 1)[0][0] for _ in range(2 * sum(SIZES))]
    epochs = stream[: sum(SIZES)], stream[sum(SIZES) :]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    unshuffled = loader_of(Shelf(), batch_size=1, micro_batch_size=1, shuffle=False)
    assert [read_step(unshuffled, 1)[0][0] for _ in range(sum(SIZES))] == sorted(epochs[0])


def drawing(shard: int) -> Iterator[tuple[int, int, float]]:
    """A buffer in which samples are shuffled, as streams have it."""
    offset, buffer = random.random(), list[int]()
    for i in range(SIZES[shard]):
        buffer.append(i)
        if len(buffer) == 3:
            yield shard, buffer.pop(random.randrange(3)), offset + random.random()
    random.shuffle(buffer)
    for i in buffer:
        yield shard, i, offset


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_shard_draws_is_the_same_whoever_reads_and_from_wherever(num_workers: int) -> None:
    whole_run = loader_of(drawing)
    expected = [read_step(whole_run, 1) for _ in range(20)]
    loader = loader_of(drawing, num_workers=num_workers)
    for number in (0, 1, 7, 8, 3, 12, 13, 14, 19):  # going on, forward and back
        loader.position = 8 * number
        found = {i: data for i, (data, _) in zip(range(1, 4), loader.read([1, 2, 3]), strict=True)}
        assert found == {i: expected[number][i] for i in range(1, 4)}
        loader.advance()
    loader.close()


class PerProcess(Shelf):
    """Tells which worker process has read a sample."""

    def __call__(self, shard: int) -> Iterator[Any]:
        for place in super().__call__(shard):
            worker = get_worker_info()
            assert worker is not None
            yield *place, worker.id


def test_each_worker_process_reads_on_in_its_own_lanes() -> None:
    loader = loader_of(PerProcess(), num_workers=2)
    for _ in range(6):
        readers = [{sample[2] for sample in data} for data, _ in loader.read([0, 1, 2])]
        assert readers == [{0}, {1}, {0}]
        loader.advance()
    loader.close()


def test_rows_by_number_are_not_read_past() -> None:
    asked: list[int] = []

    class Rows:
        def __init__(self, shard: int) -> None:
            self.shard = shard

        def __len__(self) -> int:
            return SIZES[self.shard]

        def __getitem__(self, i: int) -> tuple[int, int]:
            asked.append(i)
            return self.shard, i

    loader = loader_of(Rows)
    found = [data for data, _ in loader.read([3])]
    assert asked[3:] == [i for _, i in found[0]]  # after the first sample, which ranks compare


@pytest.mark.parametrize(("difference", "found"), [(-1, r"gave \d+:"), (1, "gave more:")])
@pytest.mark.parametrize("kind", [iter, list])
def test_a_shard_with_another_number_of_samples_is_named(
    difference: int, found: str, kind: Callable[[Any], Any]
) -> None:
    loader = loader_of(lambda shard: kind(range(max(0, SIZES[shard] + difference))))
    expected = rf"^shard \d was to have \d+ samples, and open_shard {found if kind is iter else 'gave'}"
    with pytest.raises(ValueError, match=expected):
        [read_step(loader, 1) for _ in range(loader.num_steps(1))]


def test_an_error_names_the_shard_and_the_place_in_it() -> None:
    def broken(shard: int) -> Iterator[int]:
        yield from range(SIZES[shard] - 1)
        raise OSError("cannot read on")

    loader = loader_of(broken)
    with pytest.raises(OSError, match="cannot read on") as raised:
        [read_step(loader, 1) for _ in range(loader.num_steps(1))]
    assert re.search(r"^sample \d+ \(number \d+ of shard \d\) of Shards, epoch 0$", raised.value.__notes__[0])


def test_generators_that_are_left_are_closed() -> None:
    closed: list[int] = []

    def tidy(shard: int) -> Iterator[int]:
        try:
            yield from range(SIZES[shard])
        finally:
            closed.append(shard)

    loader = loader_of(tidy)
    list(loader.read([0, 3]))
    assert len(closed) == 3  # opened anew after the first sample, which ranks compare
    loader.close()
    assert len(closed) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loader_of(Shelf(), sizes=[1, 2, 3]), "sizes of 10 shards, each at least 0, got 3"),
        (lambda: loader_of(Shelf(), lengths=[1] * sum(SIZES)), "lengths with open_shard"),
        (lambda: Loader(range(8), 4, 2, sizes=[8]), "sizes are of shards: pass open_shard"),
        (lambda: Loader("shard.txt", 4, 2, open_shard=iter), "expected a list of shards, got str"),
        (lambda: loader_of(Shelf(), sizes=[0] * len(SIZES)), "at least one sample"),
        (
            lambda: loader_of(Shelf(), batch_size=16).load_state_dict(loader_of(Shelf()).state_dict()),
            "twice or",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()
