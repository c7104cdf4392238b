"""A state in shards has the hash and the samples that it has in one place, however the shards lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.hash import BEAT_BLOCKS, TABLE, SharedHash, own_digests
from instep.state.shards import MODEL, Shard, owned
from tests.parity import numbers
from tests.state.partitions import RANKS, drawn, entries, shards
from tests.state_oracle import sampled_blocks, state_digests
from tests.world import world


@world(RANKS)
def hashed(mesh: Mesh, seed: int) -> None:
    shared = SharedHash(mesh.world.group)
    for step in (7, 8):  # by a table that is made, and by one that is there
        tensors = drawn(seed)
        own = list(owned(shards(tensors, seed, mesh.rank), mesh.rank))
        assert shared.digests(own, step) == state_digests(entries(tensors), step)
        for turn in range(3):
            assert shared.samples(own, turn, 3) == sampled_blocks(entries(tensors), turn, 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_any_partition_has_the_hash_and_the_samples_of_the_whole(seed: int) -> None:
    hashed(seed=seed)


def test_a_block_that_all_hold_is_hashed_by_one_and_all_have_as_much_to_do() -> None:
    x = numbers(8 * BLOCK_ELEMENTS, key="x")
    shards = [Shard.whole("x", x, (0, 1))]
    first, second = (list(owned(shards, rank)) for rank in (0, 1))
    assert [shard.blocks for shard in (*first, *second)] == [range(4), range(4, 8)]
    assert torch.equal(torch.cat([shard.tensor for shard in (*first, *second)]), x)


def test_what_has_no_elements_is_owned_by_one() -> None:
    shards = [Shard.whole("empty", torch.zeros(0, 3), (0, 1, 2))]
    assert [len(list(owned(shards, rank))) for rank in range(3)] == [1, 0, 0]


@world(RANKS)
def test_a_flipped_bit_of_any_rank_changes_the_hash_of_its_tensor_alone(mesh: Mesh) -> None:
    x, other = numbers(90, 100, key="x"), numbers(9000, key="y")
    sound, before = state_digests([("x", x), ("y", other)], 3)
    columns = (25 * mesh.rank, 25 * mesh.rank + 25)
    for culprit in range(RANKS):
        mine = x[:, slice(*columns)].clone()
        own = [Shard(f"{MODEL}x", (90, 100), x.dtype, 0, 2250, (0, ""), ((0, 90), columns), mine)]
        if mesh.rank == 0:
            own.append(Shard.whole(f"{MODEL}y", other, order=(1, "")))
        if mesh.rank == culprit:
            mine.view(torch.int32)[5, 7] ^= 1
        spoiled, after = SharedHash(mesh.world.group).digests(own, 3)
        assert spoiled != sound
        assert [name for name in before if before[name] != after[name]] == ["x"]


def piece(
    first: int, last: int, *, length: int = 2 * BLOCK_ELEMENTS, dtype: torch.dtype = torch.float32
) -> Shard:
    return Shard("model:m", (length,), dtype, first, last, tensor=torch.zeros(last - first, dtype=dtype))


HALF, WHOLE = BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((piece(0, HALF), piece(0, HALF)), "each of 8192 elements once, .* got 0 to 4096 in rank 0"),
        ((piece(0, HALF), piece(0, WHOLE)), "got 0 to 4096 in rank 0, 0 to 8192 in rank 1"),
        (
            (piece(0, HALF), piece(HALF, WHOLE, dtype=torch.float64)),
            "got float64.8192. at place .0, ''. of the hash in rank 1",
        ),
        ((piece(0, HALF), piece(HALF, WHOLE, length=WHOLE + 1)), "float32.8193. at place .0, ..* in rank 1"),
    ],
    ids=["a gap", "an overlap", "another dtype", "another shape"],
)
@world(2)
def test_parts_that_are_not_those_of_one_state_are_refused_on_all_ranks(
    mesh: Mesh, parts: Sequence[Shard], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        SharedHash(mesh.world.group).digests([parts[mesh.rank]], 0)
    assert "'model:m'" in str(caught.value)


LENGTH = 4 * BLOCK_ELEMENTS + 5


class Counted:
    """A group that writes down which bytes are gathered."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size, self.ranks = group, group.rank, group.size, group.ranks
        self.operations: list[str] = []

    def all_gather_bytes(self, data: bytes, operation: str, *, limit: int = 1 << 24) -> list[bytes]:
        self.operations.append(operation)
        return self.group.all_gather_bytes(data, operation, limit=limit)


def pieces(x: torch.Tensor, edge: int, rank: int) -> list[Shard]:
    """``x`` of two ranks, cut after ``edge`` blocks."""
    first, last = (0, edge * BLOCK_ELEMENTS) if rank == 0 else (edge * BLOCK_ELEMENTS, LENGTH)
    return [Shard("model:x", (LENGTH,), x.dtype, first, last, tensor=x[first:last], holders=(rank,))]


@world(2)
def test_the_table_is_made_again_only_when_the_parts_of_a_rank_are_others(mesh: Mesh) -> None:
    group = Counted(mesh.world.group)
    together = SharedHash(group)  # type: ignore[arg-type]
    for step, edge in enumerate((2, 2, 1, 1, 3)):
        x = numbers(LENGTH, key=f"step {step}")
        assert together.digests(pieces(x, edge, mesh.rank), step) == state_digests([("x", x)], step)
        assert together.samples(pieces(x, edge, mesh.rank), step, 2) == sampled_blocks([("x", x)], step, 2)
    assert group.operations.count(TABLE) == 3


@world(2)
def test_what_one_rank_alone_has_dropped_is_missed_by_all(mesh: Mesh) -> None:
    together, x = SharedHash(mesh.world.group), numbers(LENGTH, key="x")
    y = [Shard.whole("model:y", torch.ones(3), (0,), (1, ""))] if mesh.rank == 0 else []
    before = together.digests([*pieces(x, 2, mesh.rank), *y], 0)
    held = [] if mesh.rank else pieces(x, 2, 0)
    said = f"'model:x': expected shards .* each of {LENGTH} elements once, .*, got 0 to 8192"
    with pytest.raises(ValueError, match=said):
        together.digests([*held, *y], 1)
    assert together.digests([*pieces(x, 2, mesh.rank), *y], 0) == before


@world(2)
def test_whoever_waits_for_the_others_says_so(mesh: Mesh) -> None:
    phases: list[str] = []
    together, x = SharedHash(mesh.world.group, phases.append), numbers(LENGTH, key="x")
    together.digests(pieces(x, 2, mesh.rank), 0)
    assert phases == ["gather", "hash", "gather"]


def test_hashing_beats_from_inside_of_a_large_tensor() -> None:
    beats: list[int] = []
    x = torch.zeros(2 * BEAT_BLOCKS * BLOCK_ELEMENTS + 1)
    own_digests([Shard.whole("x", x)], lambda: beats.append(1))
    assert len(beats) == 3
