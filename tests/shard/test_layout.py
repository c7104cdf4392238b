"""Slices of parameters: every element once, no canonical block cut, little padding."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.shard.layout import FlatLayout, cut, keep_whole

BLOCK = 4096
LENGTHS = st.lists(
    st.one_of(st.integers(0, 70), st.integers(0, 5000), st.integers(4000, 40_000)), min_size=1, max_size=12
)
RANKS = st.integers(1, 9)
GRANULES = st.sampled_from([16, 32, 64, 256])


def whole(lengths: list[int], num_ranks: int, granule: int) -> FlatLayout:
    return keep_whole(lengths, num_ranks, granule, lengths)


def spans(layout: FlatLayout) -> list[tuple[int, int]]:
    """Where the parameters with elements lie in the flat space, in its order."""
    both = zip(layout.offsets, layout.lengths, strict=True)
    return sorted((offset, offset + length) for offset, length in both if length)


def assert_each_element_has_one_owner(layout: FlatLayout) -> None:
    owned: Counter[tuple[int, int]] = Counter()
    empty: Counter[int] = Counter()
    for rank in range(layout.num_ranks):
        begin, end = rank * layout.slice_length, (rank + 1) * layout.slice_length
        for piece in layout.pieces(rank):
            assert begin <= piece.offset and piece.offset + piece.last - piece.first <= end
            assert piece.offset == layout.offsets[piece.parameter] + piece.first
            owned.update((piece.parameter, i) for i in range(piece.first, piece.last))
            empty[piece.parameter] += piece.first == piece.last
    assert set(owned) == {(i, k) for i, length in enumerate(layout.lengths) for k in range(length)}
    assert set(owned.values()) <= {1}
    assert [empty[i] for i, length in enumerate(layout.lengths) if length == 0] == [1] * layout.lengths.count(
        0
    )


@given(LENGTHS, RANKS, GRANULES)
def test_every_element_is_in_exactly_one_piece(lengths: list[int], ranks: int, granule: int) -> None:
    lengths = [min(length, 9000) for length in lengths[:5]]
    for place in (cut, whole):
        assert_each_element_has_one_owner(place(lengths, ranks, granule))


@given(LENGTHS, RANKS, GRANULES)
def test_no_parameter_lies_over_another_and_all_begin_aligned(
    lengths: list[int], ranks: int, granule: int
) -> None:
    for place in (cut, whole):
        layout = place(lengths, ranks, granule)
        found = spans(layout)
        assert len(found) == sum(length > 0 for length in lengths)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
        assert all(begin % granule == 0 for begin, _ in found)
        assert not found or found[-1][1] <= layout.num_elements


@given(LENGTHS, RANKS, GRANULES)
def test_pieces_begin_and_end_on_blocks_of_their_parameter(
    lengths: list[int], ranks: int, granule: int
) -> None:
    for place in (cut, whole):
        layout = place(lengths, ranks, granule)
        for rank in range(ranks):
            for piece in layout.pieces(rank):
                assert piece.first % BLOCK == 0
                assert piece.last % BLOCK == 0 or piece.last == lengths[piece.parameter]


@given(LENGTHS, RANKS, GRANULES)
def test_padding_is_bounded(lengths: list[int], ranks: int, granule: int) -> None:
    layout = cut(lengths, ranks, granule)
    assert layout.num_elements <= 2 * sum(lengths) + granule * len(lengths) + BLOCK * (ranks + 1)
    large = [length for length in lengths if length >= BLOCK]
    assert cut(large, ranks, granule).num_elements <= sum(large) + BLOCK * (len(large) + ranks)


def test_small_parameters_fill_the_room_that_a_large_one_leaves() -> None:
    layout = cut([BLOCK + 10, 100, 300, 2 * BLOCK, 4000, 5, BLOCK + 1, 4000], 1, 16)
    assert layout.offsets == (0, 4112, 4224, 8192, 16384, 20384, 20480, 24592)
    assert layout.num_elements == 7 * BLOCK


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_large_model_is_divided_evenly(ranks: int) -> None:
    lengths = [50_257 * 768, *[768 * 768, 768] * 40]
    layout = cut(lengths, ranks, 16)
    assert layout.num_elements < 1.001 * sum(lengths)
    for rank in range(ranks):
        own = sum(piece.last - piece.first for piece in layout.pieces(rank))
        assert abs(own - sum(lengths) / ranks) < 0.005 * sum(lengths)


def test_the_largest_parameter_is_placed_first_and_loads_are_even() -> None:
    layout = whole([5, 5, 4, 4, 3, 3, 3], 3, 16)
    loads = [sum(piece.last for piece in layout.pieces(rank)) for rank in range(3)]
    assert loads == [11, 8, 8]  # by hand: 5 | 5 | 4, then 4 | 3 | 3 to the least of each time, then 3
