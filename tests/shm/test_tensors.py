"""Operations go on beside the computation, on tensors of any kind, in place where all ranks share them."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.errors import Desync, PeerLost
from instep.shm import ShmGroup, collectives, connect
from instep.shm.heap import SLAB_BYTES
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.shm.numbers import op
from tests.world import world

LONG = 3 << 20


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def join(store: dist.Store, name: str, ranks: list[int], rank: int) -> ShmGroup:
    """A group of these ranks, which are threads."""
    pg: Any = connect(
        dist.PrefixStore(name, store), ranks.index(rank), len(ranks), timedelta(seconds=PATIENCE_S), ranks
    )
    assert isinstance(pg, ShmGroup)
    return pg


@pytest.fixture
def event() -> threading.Event:
    return threading.Event()


@world(2, backend="shm")
def test_an_operation_goes_on_while_its_caller_waits_for_what_follows_it(mesh, store):
    """Rank 0 waits for a message that rank 1 sends after an operation that rank 0 has only begun."""
    pg, other = group_of(mesh), join(store, "other", [0, 1], mesh.rank)
    for carrier in (pg, other):
        x, message = torch.ones(LONG), torch.zeros(1)
        if mesh.rank == 0:
            work = calls.all_reduce(pg, x, now=False)
            carrier.recv([message], 1, 0).wait()
            work.wait()
        else:
            calls.all_reduce(pg, x, now=True)
            carrier.send([message], 0, 0).wait()
        assert x[-1] == 2


@world(2, backend="shm")
def test_a_work_tells_how_it_is_and_a_future_has_the_tensors(mesh, event):
    pg = group_of(mesh)
    x = torch.ones(3)
    if mesh.rank == 1:
        assert event.wait(PATIENCE_S)
    work = calls.all_reduce(pg, x, now=False)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    if mesh.rank == 0:
        assert not (work.is_completed() or work.is_success() or future.done())
        with pytest.raises(RuntimeError, match=r"all_reduce did not end within 0\.01 s"):
            work.wait(timedelta(milliseconds=10))
        event.set()
    (found,) = future.wait()
    assert found is x and found.tolist() == [2, 2, 2]
    assert doubled.wait().tolist() == [4, 4, 4]
    assert work.wait() and work.wait(timedelta(seconds=PATIENCE_S))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is x
    assert work.get_future().wait()[0] is x
    assert calls.barrier(pg, now=False).get_future().wait() == []


@world(2, backend="shm")
def test_a_future_of_what_failed_raises_it(mesh):
    pg = group_of(mesh)
    work = calls.all_reduce(pg, torch.ones(3 + mesh.rank), now=False)
    future = work.get_future()
    later = future.then(lambda done: done.value())
    for failed in (future, later):
        with pytest.raises(RuntimeError, match=r"rank 0 calls all_reduce .* of 3 float32"):
            failed.wait()
    with pytest.raises(Desync):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), Desync)


@world(3, backend="shm")
def test_threads_of_a_rank_share_a_group_when_what_they_do_is_the_same(mesh):
    """Their operations pair up in whatever order they come, and none is lost."""
    pg = group_of(mesh)
    found: list[Any] = []

    def use() -> None:
        try:
            for _ in range(60):
                x = torch.ones(3)
                calls.all_reduce(pg, x).wait()
                found.append(x.tolist())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[3, 3, 3]] * 180


@pytest.fixture(params=[True, False], ids=["at once", "async"])
def now(request: pytest.FixtureRequest) -> bool:
    return request.param


@world(2, backend="shm")
def test_autograd_sees_that_a_parameter_was_written(mesh, now):
    pg = group_of(mesh)
    weight = torch.nn.Parameter(torch.full((3,), 1.0 + mesh.rank))
    for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):  # by the core, and by torch
        loss = (weight * weight).sum()
        calls.all_reduce(pg, weight, reduction, now=now).wait()
        assert weight.requires_grad and weight.is_leaf and weight.tolist() == [3, 3, 3]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@world(2, backend="shm")
def test_tensors_made_for_inference_take_part_inside_and_outside_of_it(mesh, now):
    pg = group_of(mesh)
    with torch.inference_mode():
        x = torch.ones(3)
        calls.all_reduce(pg, x, now=now).wait()
        segment = pg.allocate(16)
    calls.all_reduce(pg, x, now=now).wait()
    out = torch.zeros(6)
    calls.all_gather_single(pg, out, x, now=now).wait()
    assert out.tolist() == [4] * 6
    shared = segment.elements(torch.float32).fill_(mesh.rank + 1)
    calls.all_reduce(pg, shared, now=now).wait()
    assert shared.tolist() == [3] * 4


@world(2, backend="shm")
def test_the_default_device_and_dtype_of_torch_change_nothing(mesh):
    pg = group_of(mesh)
    before = torch.get_default_dtype()
    mine = torch.full((2,), mesh.rank + 1.0, dtype=torch.float32)
    out = torch.zeros(2)
    segment = pg.allocate(8).elements(torch.float32)
    with torch.device("meta"):
        calls.all_to_all_single(pg, out, mine).wait()
        assert pg.map_all([segment]) is not None
        calls.barrier(pg).wait()
        if mesh.rank == 0:
            pg.send([mine], 1, 3).wait()
        else:
            pg.recv([mine], 0, 3).wait()
        other = pg.allocate(8)
    assert torch.get_default_dtype() is before
    assert other.tensor.device.type == "cpu"
    assert out.tolist() == [1, 2]
    assert mine.tolist() == [1, 1]


@world(2, backend="shm")
def test_a_tensor_elsewhere_than_in_memory_is_refused_before_anything_happens(mesh):
    pg = group_of(mesh)
    with pytest.raises(TypeError, match="expected a tensor on the CPU, got one on meta"):
        calls.all_reduce(pg, torch.ones(3, device="meta"))
    odd = torch.full((3,), 2.0 ** (1 + mesh.rank), dtype=torch.float8_e8m0fnu)
    calls.broadcast(pg, odd, 1).wait()  # data of any dtype is moved
    assert odd.float().tolist() == [4.0] * 3
    x = torch.ones(3)
    calls.all_reduce(pg, x).wait()
    assert x.tolist() == [2, 2, 2]


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
