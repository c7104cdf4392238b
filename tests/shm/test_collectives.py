"""Every collective gives what its definition says, on one to five ranks, for every dtype, size and layout."""

from __future__ import annotations

import pytest
import torch

from tests.shm import calls
from tests.shm.calls import group_of
from tests.shm.conftest import SMALL_BYTES
from tests.shm.numbers import (
    FLOATS,
    INTEGERS,
    MOVED,
    REDUCTIONS,
    defined,
    op,
    reduced,
    same_bits,
    values,
)
from tests.world import world

pytestmark = pytest.mark.usefixtures("small_halves")

# Of float32: nothing, one, odd, more than a half holds.
LENGTHS = (0, 1, 7, SMALL_BYTES // 4 + 3)
MANY_ROUNDS = 5 * SMALL_BYTES // 2 + 5  # and more than is added at once (32 KiB)


@pytest.fixture(params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 5])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[True, False], ids=["at once", "async"])
def now(request: pytest.FixtureRequest) -> bool:
    return request.param


def everybody(size: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [values(rank, length, dtype) for rank in range(size)]


def test_all_reduce_gives_every_reduction_of_every_dtype_in_rank_order(size):
    world(size, backend="shm")(reduces_everything)()


def reduces_everything(mesh):
    pg = group_of(mesh)
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for name in REDUCTIONS:
            if not defined(name, dtype):
                continue
            for length in LENGTHS:
                parts = everybody(mesh.world.size, length, dtype)
                x = parts[mesh.rank].clone()
                calls.all_reduce(pg, x, op(name)).wait()
                assert same_bits(x, reduced(parts, name)), (dtype, name, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_long_all_reduce_goes_in_pieces_and_gives_the_same_sum(size, now, dtype):
    world(size, backend="shm")(reduces_long)(now=now, dtype=dtype)


def reduces_long(mesh, now, dtype):
    parts = everybody(mesh.world.size, MANY_ROUNDS, dtype)
    x = parts[mesh.rank].clone()
    calls.all_reduce(group_of(mesh), x, now=now).wait()
    assert same_bits(x, reduced(parts, "sum"))


@pytest.mark.parametrize("name", ["sum", "avg", "max"])
def test_reduce_writes_the_result_at_the_root_and_nowhere_else(size, name):
    world(size, backend="shm")(reduces_to_each)(name=name)


def reduces_to_each(mesh, name):
    for root in range(mesh.world.size):
        for length in LENGTHS:
            parts = everybody(mesh.world.size, length)
            x = parts[mesh.rank].clone()
            calls.reduce(group_of(mesh), x, root, op(name)).wait()
            assert same_bits(x, reduced(parts, name) if mesh.rank == root else parts[mesh.rank])


def test_every_rank_may_be_the_root_of_a_broadcast(size, now):
    world(size, backend="shm")(broadcasts)(now=now)


def broadcasts(mesh, now):
    for root in range(mesh.world.size):
        for length in LENGTHS:
            x = values(mesh.rank, length, torch.float32)
            calls.broadcast(group_of(mesh), x, root, now=now).wait()
            assert same_bits(x, values(root, length, torch.float32)), (root, length)


def test_all_gather_brings_everybody_s_part_to_everybody(size, now):
    world(size, backend="shm")(gathers)(now=now)


def gathers(mesh, now):
    pg, count = group_of(mesh), mesh.world.size
    for length in LENGTHS:
        parts = everybody(count, length)
        outs = [torch.full((length,), -1.0) for _ in range(count)]
        calls.all_gather(pg, outs, parts[mesh.rank], now=now).wait()
        assert all(map(same_bits, outs, parts)), length
        out = torch.full((count * length,), -1.0)
        calls.all_gather_single(pg, out, parts[mesh.rank], now=now).wait()
        assert same_bits(out, torch.cat(parts)), length


def test_coalesced_collectives_are_as_many_single_ones(size):
    world(size, backend="shm")(coalesces)()


def coalesces(mesh):
    pg, count = group_of(mesh), mesh.world.size
    by_length = [everybody(count, length * count) for length in LENGTHS]
    mine = [parts[mesh.rank] for parts in by_length]
    sums = [reduced(parts, "sum") for parts in by_length]

    outs = [torch.zeros(count * len(x)) for x in mine]
    pg.allgather_into_tensor_coalesced(outs, mine).wait()
    assert all(map(same_bits, outs, map(torch.cat, by_length)))

    shares = [torch.zeros(length) for length in LENGTHS]
    pg.reduce_scatter_tensor_coalesced(shares, mine).wait()
    assert all(map(same_bits, shares, (total.view(count, -1)[mesh.rank] for total in sums)))

    xs = [x.clone() for x in mine]
    pg.allreduce_coalesced(xs).wait()
    assert all(map(same_bits, xs, sums))

    lists = [[torch.zeros(len(x)) for x in mine] for _ in range(count)]
    pg.allgather_coalesced(lists, mine).wait()
    for rank, found in enumerate(lists):
        assert all(map(same_bits, found, (parts[rank] for parts in by_length)))


def test_coalesced_collectives_of_nothing_do_nothing():
    world(2, backend="shm")(coalesces_nothing)()


def coalesces_nothing(mesh):
    pg = group_of(mesh)
    pg.allreduce_coalesced([]).wait()
    pg.allgather_into_tensor_coalesced([], []).wait()
    pg.reduce_scatter_tensor_coalesced([], []).wait()
    calls.barrier(pg).wait()


def test_gather_brings_all_parts_to_the_root_and_scatter_takes_them_back(size, now):
    world(size, backend="shm")(gathers_and_scatters)(now=now)


def gathers_and_scatters(mesh, now):
    pg, count = group_of(mesh), mesh.world.size
    for root in range(count):
        for length in LENGTHS:
            parts = everybody(count, length)
            is_root = mesh.rank == root
            outs = [torch.zeros(length) for _ in range(count)] if is_root else []
            calls.gather(pg, outs, parts[mesh.rank], root, now=now).wait()
            assert all(map(same_bits, outs, parts)), (root, length)
            whole = torch.zeros(count * length if is_root else 0)
            calls.gather_single(pg, whole, parts[mesh.rank], root, now=now).wait()
            assert same_bits(whole, torch.cat(outs or [whole])), (root, length)
            back = torch.zeros(length)
            calls.scatter(pg, back, outs, root, now=now).wait()
            assert same_bits(back, parts[mesh.rank]), (root, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_reduce_scatter_gives_every_rank_its_share_of_the_sum(size, dtype):
    world(size, backend="shm")(reduce_scatters)(dtype=dtype)


def reduce_scatters(mesh, dtype):
    pg, count = group_of(mesh), mesh.world.size
    for name in ("sum", "avg", "min"):
        for length in LENGTHS:
            parts = everybody(count, count * length, dtype)
            expected = reduced(parts, name).view(count, length)[mesh.rank]
            out = torch.zeros(length, dtype=dtype)
            calls.reduce_scatter_single(pg, out, parts[mesh.rank], op(name)).wait()
            assert same_bits(out, expected), (name, length)
            out = torch.zeros(length, dtype=dtype)
            xs = [row.clone() for row in parts[mesh.rank].view(count, length)]
            calls.reduce_scatter(pg, out, xs, op(name), now=False).wait()
            assert same_bits(out, expected), (name, length)


def test_all_to_all_is_a_transposition(size, now):
    world(size, backend="shm")(transposes)(now=now)


def transposes(mesh, now):
    pg, count = group_of(mesh), mesh.world.size
    for length in LENGTHS:
        table = torch.stack(everybody(count, count * length)).view(count, count, length)
        expected = table[:, mesh.rank].contiguous()
        outs = [torch.zeros(length) for _ in range(count)]
        calls.all_to_all(pg, outs, list(table[mesh.rank]), now=now).wait()
        assert all(map(same_bits, outs, expected)), length
        out = torch.zeros(count * length)
        calls.all_to_all_single(pg, out, table[mesh.rank].reshape(-1), now=now).wait()
        assert same_bits(out, expected.view(-1)), length


def lengths(size: int, longest: int) -> list[list[int]]:
    """How many rows sender s has for receiver d: some nothing, the last sender nothing at all."""
    return [
        [((3 * sender + 5 * receiver) % 4) * longest // 3 for receiver in range(size)]
        if sender < size - 1
        else [0] * size
        for sender in range(size)
    ]


@pytest.mark.parametrize("longest", [0, 3, 3000, SMALL_BYTES])
def test_all_to_all_takes_parts_of_any_length_and_none(size, longest):
    world(size, backend="shm")(sends_uneven)(longest=longest)


def sends_uneven(mesh, longest):
    pg, count, me = group_of(mesh), mesh.world.size, mesh.rank
    table = lengths(count, longest)
    everything = [
        [values(100 * sender + receiver, length, torch.float32) for receiver, length in enumerate(row)]
        for sender, row in enumerate(table)
    ]
    expected = [row[me] for row in everything]
    outs = [torch.zeros(len(part)) for part in expected]
    calls.all_to_all(pg, outs, everything[me]).wait()
    assert all(map(same_bits, outs, expected))
    out = torch.zeros(sum(map(len, expected)))
    splits = [row[me] for row in table]
    calls.all_to_all_single(pg, out, torch.cat(everything[me]), splits, table[me], now=False).wait()
    assert same_bits(out, torch.cat(expected))


def test_splits_count_rows_and_not_elements():
    world(3, backend="shm")(sends_rows)()


def sends_rows(mesh):
    rows = torch.full((6, 2), float(mesh.rank))
    out = torch.empty(3 * (mesh.rank + 1), 2)
    calls.all_to_all_single(group_of(mesh), out, rows, [mesh.rank + 1] * 3, [1, 2, 3]).wait()
    assert out[:, 1].tolist() == [float(sender) for sender in range(3) for _ in range(mesh.rank + 1)]


@pytest.fixture
def seen() -> list[int]:
    return []


def test_nobody_leaves_a_barrier_before_all_have_come(size, now, seen):
    world(size, backend="shm")(meets)(now=now, seen=seen)


def meets(mesh, now, seen):
    pg, count = group_of(mesh), mesh.world.size
    for times in range(1, 51):
        seen.append(mesh.rank)
        calls.barrier(pg, now=now).wait()
        assert len(seen) >= times * count
        calls.barrier(pg, now=now).wait()


def test_data_of_every_dtype_arrives_as_it_was(size):
    world(size, backend="shm")(moves_every_dtype)()


def moves_every_dtype(mesh):
    pg, count = group_of(mesh), mesh.world.size
    for dtype in MOVED:
        parts = everybody(count, 13 * count, dtype)
        x = parts[mesh.rank].clone()
        calls.broadcast(pg, x, count - 1).wait()
        assert same_bits(x, parts[count - 1]), dtype
        out = torch.zeros(count * 13 * count, dtype=dtype)
        calls.all_gather_single(pg, out, parts[mesh.rank]).wait()
        assert same_bits(out, torch.cat(parts)), dtype
        out = torch.zeros(13 * count, dtype=dtype)
        calls.all_to_all_single(pg, out, parts[mesh.rank]).wait()
        expected = torch.cat([part.view(count, 13)[mesh.rank] for part in parts])
        assert same_bits(out, expected), dtype


def test_complex_numbers_are_added_and_averaged():
    world(3, backend="shm")(adds_complex)()


def adds_complex(mesh):
    for name, factor in (("sum", 3), ("avg", 1)):
        x = torch.tensor([1 + 2j, -3j]) * (mesh.rank + 1)
        calls.all_reduce(group_of(mesh), x, op(name)).wait()
        assert x.tolist() == [factor * (2 + 4j), factor * -6j]
