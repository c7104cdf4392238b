"""The state hash and its samples: every bit that training carries on, however shards and memory lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.net.process_group import Group, alone
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.hash import BEAT_BLOCKS, TABLE, SharedHash, own_digests
from instep.state.shards import MODEL, Shard, elements, owned, put_elements
from tests.parity import numbers
from tests.state.partitions import RANKS, drawn, entries, shards
from tests.state_oracle import Entry, sampled_blocks, state_digests, state_sha256
from tests.world import world


def hash_of(*entries: Entry, step: int = 0) -> str:
    """The hash, after a check that it and the samples are those of their definition."""
    shards = [Shard.whole(MODEL + name, x, order=(i, "")) for i, (name, x) in enumerate(entries)]
    shared = SharedHash(alone())
    found = shared.digests(shards, step)
    assert found == state_digests(entries, step)
    turns = [shared.samples(shards, step + turn, 3) for turn in range(3)]
    assert turns == [sampled_blocks(entries, step + turn, 3) for turn in range(3)]
    blocks = [(name, block) for name, x in entries for block in range(-(-x.numel() // BLOCK_ELEMENTS))]
    assert sorted((name, block) for its in turns for name, block, _ in its) == sorted(blocks)  # each once
    return found[0]


X = torch.arange(6.0)
OTHERS: dict[str, tuple[Tensor, str, int]] = {
    "one ulp": (X.nextafter(torch.tensor(9.0)), "w", 0),
    "dtype": (X.double(), "w", 0),
    "kind": (X.view(torch.int32), "w", 0),
    "shape": (X.view(2, 3), "w", 0),
    "length": (X[:5], "w", 0),
    "order": (X.flip(0), "w", 0),
    "name": (X, "v", 0),
    "step": (X, "w", 1),
    "sign of zero": (torch.cat([-X[:1], X[1:]]), "w", 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_hash_tells_apart(name: str) -> None:
    other, key, step = OTHERS[name]
    assert hash_of(("w", X)) == hash_of(("w", X.clone())) != hash_of((key, other), step=step)


def test_the_order_and_the_borders_of_entries_count() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    assert len({hash_of(("a", a), ("b", b)), hash_of(("b", b), ("a", a))}) == 2
    assert hash_of(("a", a), ("b", b[:0])) != hash_of(("a", a))
    assert hash_of(("a", torch.empty(0, 4))) != hash_of(("a", torch.empty(4, 0)))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed in memory": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "part of rows": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "at another address": lambda x: torch.cat([x[:1], x])[1:],
    "a parameter": lambda x: nn.Parameter(x.t().contiguous().t()),
}


@pytest.mark.parametrize("view", VIEWS)
def test_where_and_how_a_tensor_lies_in_memory_does_not_count(view: str) -> None:
    x = torch.randn(90, 1050)
    assert hash_of(("w", VIEWS[view](x))) == hash_of(("w", x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_nans_count_as_one(dtype: torch.dtype) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    quiet = torch.tensor([1.0, torch.nan, -0.0, torch.inf], dtype=dtype)
    other = quiet.clone()
    other.view(integers)[1] += 1  # another payload
    assert other.view(integers).tolist() != quiet.view(integers).tolist()
    assert hash_of(("w", other)) == hash_of(("w", quiet)) != hash_of(("w", quiet.nan_to_num(1.0)))
    assert state_sha256([("w", quiet.abs())], 0) != hash_of(("w", quiet))  # the sign of zero


@pytest.mark.parametrize("start", [0, 1, 23])
@pytest.mark.parametrize("stop", [24, 61, 120])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1), (2, 0, 1, 3)], ids=str)
def test_a_range_of_elements_in_logical_order_is_read_and_written_in_any_order_of_memory(
    order: tuple[int, ...], start: int, stop: int
) -> None:
    x = torch.arange(120.0).view(2, 3, 4, 5)
    back = sorted(range(4), key=order.__getitem__)
    y = x.permute(order).contiguous().permute(back)
    assert torch.equal(elements(y, start, stop), torch.arange(float(start), stop))
    put_elements(y, start, -torch.arange(float(start), stop))
    assert torch.equal(y.flatten(), torch.where((x >= start) & (x < stop), -x, x).flatten())


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
