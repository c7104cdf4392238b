"""The order of the stream: every sample once per epoch, in an order that only seed and epoch decide."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.order import feistel, round_keys, sample_at
from instep.data.shuffled import BLOCK, Shuffled

SEEDS = st.integers(0, 2**64 - 1)
few = settings(deadline=None, max_examples=50)


def epoch_of(epoch: int, num_samples: int, seed: int) -> list[int]:
    return [sample_at(epoch * num_samples + i, num_samples, seed) for i in range(num_samples)]


@few
@given(num_samples=st.integers(1, 600), epoch=st.integers(0, 2**40), seed=SEEDS)
def test_every_sample_stands_once_in_every_epoch(num_samples: int, epoch: int, seed: int) -> None:
    assert sorted(epoch_of(epoch, num_samples, seed)) == list(range(num_samples))


@few
@given(base=st.integers(1, 24), seed=SEEDS, epoch=st.integers(0, 1000))
def test_the_network_is_a_bijection_on_every_square(base: int, seed: int, epoch: int) -> None:
    keys = round_keys(seed, epoch)
    assert {feistel(i, base, keys) for i in range(base**2)} == set(range(base**2))


def test_samples_fall_evenly_on_places() -> None:
    # 10 samples, 4000 epochs: each (place, sample) is expected 400 times, with a deviation of about 19
    counts = [[0] * 10 for _ in range(10)]
    for epoch in range(4000):
        for place, sample in enumerate(epoch_of(epoch, 10, seed=0)):
            counts[place][sample] += 1
    assert all(400 - 5 * 19 < count < 400 + 5 * 19 for row in counts for count in row)


def test_neighbours_in_the_data_are_no_neighbours_in_the_stream() -> None:
    order = epoch_of(0, 10_000, seed=7)
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 20  # about 2 by chance


def test_epochs_and_seeds_which_count_in_all_64_bits_have_other_orders() -> None:
    orders = [epoch_of(*which) for which in ((0, 100, 5), (0, 100, 5 + 2**32), (0, 100, 4), (1, 100, 5))]
    assert all(one != other for one, other in combinations(orders, 2))


@pytest.mark.parametrize(
    ("position", "num_samples", "seed", "message"),
    [
        (0, 0, 0, "expected num_samples >= 1, got 0"),
        (-1, 5, 0, "expected position >= 0, got -1"),
        (0, 5, -1, "expected 0 <= seed < 2\\*\\*64, got -1"),
        (0, 5, 2**64, "expected 0 <= seed"),
    ],
)
def test_a_place_outside_the_stream_is_refused(
    position: int, num_samples: int, seed: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_at(position, num_samples, seed)


WORDS = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=50)
@given(
    num_samples=st.integers(1, 3 * BLOCK) | st.integers(1, 2**63 - 1),
    epoch=st.integers(0, 2**20),
    seed=WORDS,
    drawn=st.data(),
)
def test_blocks_have_the_samples_that_positions_have_one_by_one(
    num_samples: int, epoch: int, seed: int, drawn: st.DataObject
) -> None:
    order = Shuffled(num_samples, seed, shuffle=True)
    for _ in range(3):
        first = epoch * num_samples + drawn.draw(st.integers(0, num_samples - 1))
        positions = range(first, first + drawn.draw(st.integers(0, 40) | st.just(3 * BLOCK)))
        expected = [sample_at(position, num_samples, seed) for position in positions]
        assert order.samples_at(positions) == expected
        assert order.samples_at(positions) == expected  # of blocks that are kept
