"""A state that is elsewhere: each element is in one place exactly, and any range of it can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instep.errors import CheckpointRejected
from instep.memory import allocate
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.shards import MODEL, Shard
from instep.state.stored import (
    Source,
    assemble,
    offsets,
    shards_from_json,
    shards_to_json,
    stored_from_json,
    stored_to_json,
    views,
)

B = BLOCK_ELEMENTS
NAME = MODEL + "weight"


class Held:
    """A place: the elements from ``first`` on are their own numbers."""

    def __init__(self, first: int) -> None:
        self.first = first

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        begin = self.first + first
        out.copy_(torch.arange(begin, begin + out.numel()))


def rows(*edges: tuple[int, int], numel: int) -> dict[str, list[Shard]]:
    """Each piece is in a place of its own."""
    return {str(i): [Shard(NAME, (numel,), torch.int64, *ends, None)] for i, ends in enumerate(edges)}


def body(*edges: tuple[int, int], numel: int) -> Any:
    """The same, as a manifest says it."""
    pieces = [[*ends, str(i)] for i, ends in enumerate(edges)]
    return {"entries": {NAME: [[numel], "int64", pieces]}, "ties": {}}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.randoms(), st.data())
def test_any_range_is_read_from_as_many_pieces_as_it_takes(lengths, random, data) -> None:
    edges = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths)) if lengths[i]]
    edges, numel = edges or [(0, 0)], sum(lengths)
    random.shuffle(edges)
    tensors, _ = stored_from_json(body(*edges, numel=numel))
    assert tensors == assemble(rows(*edges, numel=numel))
    assert stored_from_json(json.loads(json.dumps(stored_to_json(tensors, {})))) == (tensors, {})
    source = Source(tensors, {str(i): Held(first) for i, (first, _) in enumerate(edges)})
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    for begin, end in ((first, last), (0, numel)):
        read = source.read(NAME, begin, end)
        assert torch.equal(read, torch.arange(begin, end))
        assert read.data_ptr() % 64 == 0
    assert source.layout(MODEL) == {"weight": ((numel,), torch.int64)}


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 4), (6, 10)],
        [(2, 10)],
        [(0, 9)],
        [(0, 11)],
        [(0, 6), (5, 10)],
        [(0, 10), (0, 10)],
        [(0, 4), (4, 3), (4, 10)],
        [(0, 10), (10, 10)],
        [],
    ],
    ids=[*("hole", "no begin", "no end", "too long", "overlap", "twice", "backwards", "empty", "nothing")],
)
def test_holes_and_overlaps_are_rejected(edges: list[tuple[int, int]]) -> None:
    got = ", ".join(f"{first} to {last} in {i}" for i, (first, last) in enumerate(edges))
    expected = (
        f"'{NAME}': expected shards that together have each of 10 elements once, .* got {got or 'none'}:"
    )
    with pytest.raises(CheckpointRejected, match=expected):
        stored_from_json(body(*edges, numel=10))
    for error in (CheckpointRejected, ValueError):
        if edges:
            with pytest.raises(error, match=expected):
                assemble(rows(*edges, numel=10), error)


L, R, T = [[0, 4], [0, 3]], [[0, 4], [3, 6]], [[0, 2], [0, 6]]


@pytest.mark.parametrize(
    ("pieces", "sound"),
    [
        ([[0, 12, L], [0, 12, R]], True),
        ([[0, 5, L], [5, 12, L], [0, 12, R]], True),
        ([[0, 12, L]], False),
        ([[0, 12, L], [0, 12, T]], False),
        ([[0, 12, L], [0, 11, R]], False),
        ([[0, 12, L], [0, 12, R], [0, 24]], False),
        ([[0, 12, L], [0, 12, L], [0, 12, R]], False),
        *(
            ([[0, 12, L], [0, 12, box]], False)
            for box in ([[0, 4]], [[0, 4], [3, 7]], [[0, 4], [6, 3]], [[0, 4], [3]], [[0, 4], 3], None, 7)
        ),
    ],
    ids=repr,
)
def test_boxes_make_up_the_tensor(pieces: list[list[Any]], sound: bool) -> None:
    told = [[first, last, str(i), *box] for i, (first, last, *box) in enumerate(pieces)]
    manifest = {"entries": {NAME: [[4, 6], "int64", told]}, "ties": {}}
    rows = {str(i): [[NAME, [4, 6], "int64", a, b, None, *box]] for i, (a, b, *box) in enumerate(pieces)}
    if sound:
        tensors, _ = stored_from_json(manifest)
        assert tensors == assemble({place: shards_from_json(its) for place, its in rows.items()})
        assert json.loads(json.dumps(stored_to_json(tensors, {}))) == manifest
        return
    with pytest.raises(CheckpointRejected):
        stored_from_json(manifest)
    with pytest.raises(CheckpointRejected):
        assemble({place: shards_from_json(its) for place, its in rows.items()})


def test_a_tensor_without_elements_is_in_one_place() -> None:
    (stored,) = assemble(rows((0, 0), numel=0)).values()
    assert stored.numel == 0
    for edges in ([(0, 0), (0, 0)], [(0, 0)] * 3):
        with pytest.raises(CheckpointRejected, match="each of 0 elements once"):
            assemble(rows(*edges, numel=0))
        with pytest.raises(CheckpointRejected, match="each of 0 elements once"):
            stored_from_json(body(*edges, numel=0))


OURS = Shard(NAME, (2 * B,), torch.int64, 0, B, (3, ""))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": torch.int32}, rf"expected int64\[{2 * B}\] .*as in 0, got int32\[{2 * B}\] .*in 1"),
        ({"shape": (2, B)}, rf"expected int64\[{2 * B}\] .*as in 0, got int64\[2, {B}\] .*in 1"),
        ({"order": (4, "")}, r"at place \(3, ''\) of the hash, as in 0, got .*\(4, ''\) of the hash in 1"),
        ({"order": None}, r"at place \(3, ''\) of the hash, as in 0, got .*None of the hash in 1"),
    ],
    ids=lambda other: next(iter(other)) if isinstance(other, dict) else "",
)
def test_places_that_mean_different_tensors_are_rejected(other: dict[str, Any], message: str) -> None:
    theirs = OURS._replace(first=B, last=2 * B)
    assert assemble({"0": [OURS], "1": [theirs]})
    with pytest.raises(CheckpointRejected, match=message):
        assemble({"0": [OURS], "1": [theirs._replace(**other)]})


def test_tensors_are_in_the_order_of_the_hash_and_what_is_not_hashed_comes_last() -> None:
    places = {"a": (2, "exp_avg"), "b": None, "c": (0, ""), "d": (10, ""), "e": (2, ""), "f": None}
    told = [Shard(MODEL + name, (1,), torch.int8, 0, 1, order) for name, order in places.items()]
    assert [name.removeprefix(MODEL) for name in assemble({"0": told[:3], "1": told[3:]})] == list("ceadbf")


ROW: list[Any] = [NAME, [2], "int64", 0, 2, [7, "exp_avg"]]
SHAPES = [[-2], [True], [1.0], [2**40, 2**40], [2**62] * 64, [2**62, 2**62, 0], [1] * 65, None, 2]
ORDERS = [7, [7], ["exp_avg", 7, 7], [7, None], {}, *([number, ""] for number in (-1, None, True, 2**63))]


@pytest.mark.parametrize(
    "row",
    [
        *([name, *ROW[1:]] for name in ("weight", None)),
        *([NAME, shape, *ROW[2:]] for shape in SHAPES),
        *([*ROW[:2], dtype, *ROW[3:]] for dtype in ("object", "load", [], None)),
        *([*ROW[:3], *ends, None] for ends in ((0, True), (-1, 2), (0, 2**63))),
        *([*ROW[:5], order] for order in ORDERS),
        *([*ROW, box] for box in (None, [], [[0, 3]], [[1, 1]], [[0, 1], [0, 1]])),
        *(ROW[:5], None, {}, [*ROW, [[0, 1]], 1]),
    ],
    ids=lambda x: repr(x)[:60],
)
def test_rows_from_elsewhere_are_believed_only_as_far_as_they_are_sound(row: Any) -> None:
    with pytest.raises(CheckpointRejected, match="expected a list"):
        shards_from_json({})
    assert shards_from_json([ROW]) == [Shard(NAME, (2,), torch.int64, 0, 2, (7, "exp_avg"))]
    with pytest.raises(CheckpointRejected, match=r"expected a name that begins with model:, .*, got"):
        shards_from_json([ROW, row])


@pytest.mark.parametrize(
    "change",
    [
        {"ties": None},
        {"ties": {"tied": "elsewhere"}},
        {"ties": {"tied": ["weight"]}},
        {
            "ties": {"tied": 0},
            "entries": {NAME: [[0], "int64", [[0, 0, "0"]]], MODEL + "0": [[0], "int64", [[0, 0, "0"]]]},
        },
        {"entries": None},
        {"entries": {NAME: [[10], "int64"]}},
        {"entries": {NAME: [[10], "int64", None]}},
        {"entries": {NAME: [[10], "int64", [[0, 10]]]}},
        {"entries": {NAME: [[10], "int64", [[0, 10, 3]]]}},
        {"entries": {"weight": [[10], "int64", [[0, 10, "0"]]]}},
        {"more": 1},
    ],
    ids=repr,
)
def test_what_a_manifest_says_is_believed_only_as_far_as_it_is_sound(change: dict[str, Any]) -> None:
    sound = body((0, 10), numel=10)
    assert stored_from_json({**sound, "ties": {"tied": "weight"}})[1] == {"tied": "weight"}
    with pytest.raises(CheckpointRejected):
        stored_from_json({**sound, **change})


def test_rows_travel() -> None:
    sent = [
        Shard(NAME, (3, 4), torch.bfloat16, 2, 7, (0, "")),
        Shard(NAME, (3, 4), torch.bfloat16, 2, 4, (0, ""), ((0, 3), (1, 3))),
        Shard("optimizer:step/weight", (), torch.float32, 0, 1, (9, "step")),
        Shard("optimizer:param_groups.0/lr", (), torch.float32, 0, 1, None),
    ]
    assert shards_from_json(json.loads(json.dumps(shards_to_json(sent)))) == sent


def test_views_are_aligned_inside_the_given_memory_and_do_not_overlap() -> None:
    layout = [(torch.float32, (4, 3)), (torch.int64, ()), (torch.int8, (0, 2)), (torch.bool, (65,))]
    placed = views(layout, allocate(256, 64).tensor)
    assert offsets(x.nbytes for x in placed) == [0, 64, 128, 128, 256]
    assert [(x.dtype, tuple(x.shape)) for x in placed] == layout
    assert {x.data_ptr() % 64 for x in placed} == {0}
    for number, x in enumerate(placed):
        x.fill_(number % 2)
    assert all(bool((x == number % 2).all()) for number, x in enumerate(placed))
