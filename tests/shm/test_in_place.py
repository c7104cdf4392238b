"""Tensors in memory that the ranks share are reduced where they lie, and shown to each other."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from instep.errors import Desync, PeerLost
from instep.shm import collectives
from instep.shm.heap import SLAB_BYTES
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.shm.numbers import op
from tests.world import world


def shared(pg, x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` in memory that the peers can map."""
    return pg.allocate(x.numel() * x.dtype.itemsize).elements(x.dtype).copy_(x)


@pytest.mark.parametrize("mask", [0b111, 0b001, 0b110])
def test_only_tensors_that_all_ranks_share_are_reduced_in_place(mask, monkeypatch):
    original, found = collectives._reduce_in_place, list[str]()

    def counted(op, *args):
        found.append(op.label)
        original(op, *args)

    monkeypatch.setattr(collectives, "_reduce_in_place", counted)
    world(3, backend="shm")(reduces)(mask=mask)
    # Of float32 and float64, sums and averages.
    assert len(found) == (3 * 4 if mask == 0b111 else 0)


def reduces(mesh, mask):
    pg = group_of(mesh)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for name in ("sum", "avg", "max"):
            whole = torch.full((100,), 9, dtype=dtype)
            whole = shared(pg, whole) if mask >> mesh.rank & 1 else whole
            part = whole[1 + mesh.rank :][:90].fill_(mesh.rank)  # of each rank another part
            calls.all_reduce(pg, part, op(name)).wait()
            assert set(part.tolist()) == {{"sum": 3, "avg": 1, "max": 2}[name]}
            assert set(whole[: 1 + mesh.rank].tolist()) | set(whole[91 + mesh.rank :].tolist()) == {9}


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
    assert len(starts) == 800 and all(b - a >= 1000 for a, b in pairwise(starts))


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

        def refuse(*args):
            raise OSError("too many open files")

        monkeypatch.setattr(pg._heap, "map_peer", refuse)
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
        x = pg.allocate(SLAB_BYTES // 2).elements(torch.float64)[: 1000 + n].fill_(n + mesh.rank)
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
