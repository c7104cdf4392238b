"""The order in blocks: what ``data/order.py`` says, one number after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.order import sample_at
from instep.data.shuffled import BLOCK, Shuffled

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
        positions = range(first, first + drawn.draw(st.integers(0, 40)))
        expected = [sample_at(position, num_samples, seed) for position in positions]
        assert order.samples_at(positions) == expected
        assert order.samples_at(positions) == expected  # of blocks that are kept


@pytest.mark.parametrize("num_samples", [1, 10, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 20, 1000])
def test_a_stretch_may_go_on_through_blocks_and_epochs(num_samples: int) -> None:
    positions = range(3, 3 + 4 * BLOCK)
    expected = [sample_at(position, num_samples, 7) for position in positions]
    assert Shuffled(num_samples, 7, shuffle=True).samples_at(positions) == expected
    in_order = Shuffled(num_samples, 7, shuffle=False).samples_at(positions)
    assert in_order == [position % num_samples for position in positions]
