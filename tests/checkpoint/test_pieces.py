"""Pieces of a state: each element exactly once, whoever says where it is, and any range of it to be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instep.checkpoint import pieces
from instep.checkpoint.pieces import MODEL, Row, Source, assemble, from_json, to_json
from instep.errors import CheckpointRejected

NAME = MODEL + "weight"


class Held:
    """A place: the elements from ``first`` on are their own numbers."""

    def __init__(self, first: int) -> None:
        self.first = first

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        begin = self.first + first
        out.copy_(torch.arange(begin, begin + out.numel()))


def rows(*edges: tuple[int, int], numel: int) -> dict[str, list[Row]]:
    """Each piece is in a place of its own."""
    return {str(i): [(NAME, (numel,), torch.int64, *ends)] for i, ends in enumerate(edges)}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.randoms(), st.data())
def test_any_range_is_read_from_as_many_pieces_as_it_takes(lengths, random, data) -> None:
    edges = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths)) if lengths[i]]
    numel = sum(lengths)
    edges = edges or [(0, 0)]
    random.shuffle(edges)
    readers = {str(i): Held(first) for i, (first, _) in enumerate(edges)}
    source = Source(assemble(rows(*edges, numel=numel)), readers)
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    assert source.read(NAME, first, last).tolist() == list(range(first, last))
    assert source.whole(NAME).tolist() == list(range(numel))
    assert from_json(to_json(source.entries, {})) == (source.entries, {})


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 4), (6, 10)], "begins at element 4"),
        ([(2, 10)], "begins at element 0"),
        ([(0, 9)], "10 elements"),
        ([(0, 11)], "10 elements"),
        ([(0, 6), (5, 10)], "each element once"),
        ([(0, 10), (0, 10)], "each element once"),
        ([(0, 4), (4, 3), (4, 10)], "ends after 4"),
        ([], "10 elements"),
    ],
    ids=["hole", "no begin", "no end", "too long", "overlap", "twice", "backwards", "nothing"],
)
def test_holes_and_overlaps_are_rejected(edges: list[tuple[int, int]], message: str) -> None:
    listed = [[*ends, str(i)] for i, ends in enumerate(edges)]
    with pytest.raises(CheckpointRejected, match=message):
        from_json({"entries": {NAME: [[10], "int64", listed]}, "ties": {}})
    if edges:
        with pytest.raises(CheckpointRejected, match=message):
            assemble(rows(*edges, numel=10))


def test_places_that_mean_different_entries_are_rejected() -> None:
    ours, theirs = (NAME, (10,), torch.int64, 0, 5), (NAME, (10,), torch.int32, 5, 10)
    with pytest.raises(CheckpointRejected, match="everywhere"):
        assemble({"0": [ours], "1": [theirs]})


@pytest.mark.parametrize(
    "row",
    [
        ["weight", [2], "int64", 0, 2],
        [NAME, [-2], "int64", 0, 2],
        [NAME, [2], "object", 0, 2],
        [NAME, [2], "int64", 0, True],
        [NAME, [2], "int64", -1, 2],
        [NAME, [2**40, 2**40], "int64", 0, 2],
        [NAME, [2], "int64", 0],
        None,
    ],
)
def test_rows_from_elsewhere_are_believed_only_as_far_as_they_are_sound(row: object) -> None:
    with pytest.raises(CheckpointRejected):
        pieces.rows_from_json([row])


def test_rows_travel() -> None:
    sent = [(NAME, (3, 4), torch.bfloat16, 2, 7), ("optimizer:step/weight", (), torch.float32, 0, 1)]
    assert pieces.rows_from_json(pieces.rows_to_json(sent)) == sent
