"""Tensors in memory that the ranks share are reduced where they lie, and shown to each other."""

from __future__ import annotations

import gc
import threading
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from instep.errors import Desync, PeerLost
from instep.shm import collectives
from instep.shm.heap import SLAB_BYTES
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.shm.numbers import FLOATS, REDUCTIONS, defined, op, reduced, same_bits, values
from tests.world import world

# Nothing, one, less than a cache line, several pieces for a rank.
LENGTHS = (0, 1, 7, 1021, 400_003)


@pytest.fixture(params=[1, 2, 3, 5])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[True, False], ids=["at once", "async"])
def now(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def reductions_in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every all-reduce of shared memory, by one on every rank."""
    found: list[int] = []
    original = collectives.all_reduce_in_place

    def counted(op, heap, dtype, reduction):
        found.append(op.rounds.rank)
        original(op, heap, dtype, reduction)

    monkeypatch.setattr(collectives, "all_reduce_in_place", counted)
    return found


def shared(pg, x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` in memory that the peers can map."""
    return pg.allocate(x.numel() * x.dtype.itemsize).elements(x.dtype).copy_(x)


def inputs(size: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [values(rank, length, dtype) for rank in range(size)]


_one_at_a_time = threading.Lock()


@lru_cache(maxsize=8)
def _expected(size: int, length: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    return reduced(inputs(size, length, dtype), name)


def expected(size: int, length: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The reduction of ``inputs``, once for all ranks."""
    with _one_at_a_time:
        return _expected(size, length, dtype, name)


def test_shared_tensors_are_reduced_as_private_ones_are(size, reductions_in_place):
    world(size, backend="shm")(reduces_shared)(count=reductions_in_place)


def reduces_shared(mesh, count):
    pg = group_of(mesh)
    for dtype in (*FLOATS, torch.int64, torch.bool):
        for name in REDUCTIONS:
            if not defined(name, dtype):
                continue
            for length in LENGTHS if name == "sum" else LENGTHS[:-1]:
                x = shared(pg, values(mesh.rank, length, dtype))
                before = count.count(mesh.rank)
                calls.all_reduce(pg, x, op(name)).wait()
                assert same_bits(x, expected(mesh.world.size, length, dtype, name)), (dtype, name, length)
                assert count.count(mesh.rank) == before + (length > 0)


def test_parts_of_a_segment_are_reduced_and_their_neighbours_stay(size, now):
    world(size, backend="shm")(reduces_parts)(now=now)


def reduces_parts(mesh, now):
    pg, count = group_of(mesh), mesh.world.size
    # Of each rank another part, at an address of any alignment.
    whole = shared(pg, torch.full((5000,), 9.0))
    start = 1 + 17 * mesh.rank
    parts = inputs(count, 3001)
    whole[start : start + 3001] = parts[mesh.rank]
    calls.all_reduce(pg, whole[start : start + 3001], now=now).wait()
    assert same_bits(whole[start : start + 3001], reduced(parts, "sum"))
    assert set(whole[:start].tolist()) | set(whole[start + 3001 :].tolist()) == {9.0}


@pytest.mark.parametrize("mask", [0b001, 0b110, 0b101])
def test_where_some_ranks_have_private_memory_all_get_the_same_sum(mask, now, reductions_in_place):
    world(3, backend="shm")(reduces_mixed)(mask=mask, now=now)
    assert reductions_in_place == []


def reduces_mixed(mesh, mask, now):
    pg = group_of(mesh)
    for length in LENGTHS:
        for name in ("sum", "max"):
            mine = values(mesh.rank, length, torch.float32)
            x = shared(pg, mine) if mask >> mesh.rank & 1 else mine
            calls.all_reduce(pg, x, op(name), now=now).wait()
            assert same_bits(x, expected(3, length, torch.float32, name)), (length, name)


@world(2, backend="shm")
def test_every_other_collective_takes_shared_tensors_as_it_takes_any(mesh):
    pg = group_of(mesh)
    parts = inputs(2, 1000)
    x = shared(pg, parts[mesh.rank])
    calls.broadcast(pg, x, 1).wait()
    assert same_bits(x, parts[1])
    x.copy_(parts[mesh.rank])
    out = shared(pg, torch.zeros(2000))
    calls.all_gather_single(pg, out, x).wait()
    assert same_bits(out, torch.cat(parts))
    calls.reduce_scatter_single(pg, x, out).wait()
    assert same_bits(x, 2 * parts[mesh.rank])
    calls.reduce(pg, x, 0).wait()
    assert same_bits(x, 2 * (parts[0] + parts[1]) if mesh.rank == 0 else 2 * parts[1])


@world(2, backend="shm")
def test_a_strided_view_of_shared_memory_is_reduced(mesh):
    pg = group_of(mesh)
    whole = shared(pg, torch.full((10,), mesh.rank + 1.0))
    calls.all_reduce(pg, whole[::2]).wait()
    assert whole.tolist() == [3, mesh.rank + 1] * 5


@world(3, backend="shm")
def test_many_segments_are_in_flight_at_once(mesh):
    pg = group_of(mesh)
    xs = [shared(pg, torch.full((n,), n + mesh.rank, dtype=torch.int64)) for n in range(1, 40)]
    # More than a slab: a segment of its own.
    xs.append(pg.allocate(SLAB_BYTES).elements(torch.int64)[:5].fill_(40 + mesh.rank))
    works = [calls.all_reduce(pg, x, now=False) for x in xs]
    for work in reversed(works):
        work.wait()
    assert [set(x.tolist()) for x in xs] == [{3 * n + 3} for n in range(1, 41)]


@world(3, backend="shm")
def test_what_its_owner_has_freed_is_unmapped_at_the_next_operation(mesh):
    pg = group_of(mesh)
    kept, freed = (pg.allocate(SLAB_BYTES).elements(torch.float32)[:9].fill_(mesh.rank) for _ in range(2))
    for x in (freed, kept):
        calls.all_reduce(pg, x).wait()
    mapped = pg._heap._theirs
    assert len(mapped) == 2 * (mesh.world.size - 1)
    del freed, x
    calls.barrier(pg).wait()
    calls.all_reduce(pg, kept).wait()
    assert len(mapped) == mesh.world.size - 1


@world(2, backend="shm")
def test_memory_that_threads_allocate_at_once_is_apart(mesh):
    pg, found = group_of(mesh), []

    def allocate() -> None:
        found.extend(pg.allocate(1000).tensor for _ in range(200))

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(tensor.data_ptr() for tensor in found)
    assert len(starts) == 800 and all(b - a >= 1000 for a, b in pairwise(starts) if b - a < SLAB_BYTES)
    assert len(set(starts)) == 800


@world(2, backend="shm")
def test_segments_are_aligned_zeroed_and_apart(mesh):
    pg = group_of(mesh)
    segments = [pg.allocate(nbytes, align) for align in (1, 64, 256, 4096) for nbytes in (0, 1, 65, 4096)]
    assert all(not segment.tensor.any() for segment in segments)
    for segment, align in zip(segments, [a for a in (1, 64, 256, 4096) for _ in range(4)], strict=True):
        assert segment.tensor.data_ptr() % align == 0
    spans = sorted((s.tensor.data_ptr(), s.tensor.numel()) for s in segments if s.tensor.numel())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    assert [segment.tensor.numel() for segment in segments] == [0, 1, 65, 4096] * 4


@world(3, backend="shm")
def test_what_is_exposed_is_the_memory_of_the_others_itself(mesh):
    pg = group_of(mesh)
    # Different numbers of tensors, of different lengths.
    mine = [shared(pg, torch.full((3 + n,), 10.0 * mesh.rank + n)) for n in range(mesh.rank + 1)]
    shown = pg.map_all(mine)
    assert [[x.tolist() for x in tensors] for tensors in shown] == [
        [[10.0 * rank + n] * (3 + n) for n in range(rank + 1)] for rank in range(3)
    ]
    calls.barrier(pg).wait()
    successor = (mesh.rank + 1) % 3
    shown[successor][0][0] = -1.0 - mesh.rank
    calls.barrier(pg).wait()
    assert mine[0][0] == -1.0 - (mesh.rank - 1) % 3


@world(3, backend="shm")
@pytest.mark.parametrize("private", [0, 2])
def test_nothing_is_exposed_where_one_tensor_is_private(mesh, private):
    pg = group_of(mesh)
    x = torch.ones(3) if mesh.rank == private else shared(pg, torch.ones(3))
    assert pg.map_all([shared(pg, torch.ones(1)), x]) is None
    calls.barrier(pg).wait()


@world(2, backend="shm")
def test_exposing_different_dtypes_is_an_error_on_every_rank(mesh):
    pg = group_of(mesh)
    x = shared(pg, torch.ones(3, dtype=torch.float64 if mesh.rank else torch.float32))
    with pytest.raises(Desync, match="rank 0 calls map_all of 0 float32; rank 1 calls map_all of 0 float64"):
        pg.map_all([x])


@world(2, backend="shm")
def test_nobody_goes_on_before_all_have_mapped_what_is_exposed(mesh, monkeypatch):
    """A model that was closed as soon as it was built freed memory that the other rank had not mapped yet."""
    pg = group_of(mesh)
    x = shared(pg, torch.ones(3))
    if mesh.rank == 1:

        def refuse(rank, location):
            raise OSError("too many open files")

        monkeypatch.setattr(pg._heap, "resolve", refuse)
        with pytest.raises(OSError, match="too many open files"):
            pg.map_all([x])
        return
    with pytest.raises(PeerLost, match="rank 1, which failed: OSError: too many open files"):
        pg.map_all([x])


@world(2, backend="shm")
def test_the_memory_of_a_tensor_that_its_owner_dropped_stays_until_the_operation_is_over(mesh):
    pg = group_of(mesh)
    works = []
    for n in range(50):
        x = pg.allocate(SLAB_BYTES // 2).elements(torch.int64)[: 1000 + n].fill_(n + mesh.rank)
        works.append(calls.all_reduce(pg, x, now=False))
        del x
    gc.collect()
    for n, work in enumerate(works):
        work.wait()
        assert set(work.result()[0].tolist()) == {2 * n + 1}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:instep")


@pytest.fixture
def together() -> threading.Barrier:
    return threading.Barrier(2)


@world(2, backend="shm")
def test_memory_that_is_free_is_given_back_by_all_who_have_mapped_it(mesh, together):
    pg = group_of(mesh)
    counts = []
    for n in range(60):
        x = pg.allocate(SLAB_BYTES).elements(torch.float32)[:100].fill_(n)
        calls.all_reduce(pg, x).wait()
        assert x[0] == 2 * n
        del x
        together.wait(PATIENCE_S)  # nobody is on his way while somebody counts
        counts.append((descriptors(), mappings()))
        together.wait(PATIENCE_S)
    # The other rank may have the folder of descriptors open just now.
    assert max(fds for fds, _ in counts) <= min(fds for fds, _ in counts) + 8
    assert max(maps for _, maps in counts) <= min(maps for _, maps in counts) + 8
