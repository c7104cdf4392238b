"""Nobody waits forever: who stays away, leaves or fails is named, at once where that can be seen."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.errors import PeerLost
from instep.shm import connect
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
from tests.world import world

SOON_S = 10.0  # half a world's deadline, and far above a slice of a wait, for a busy machine


class Meeting:
    """One rank stays away until the others are done."""

    def __init__(self, num_others: int) -> None:
        self.num_others = num_others
        self.done = threading.Semaphore(0)

    def stay_away(self) -> None:
        for _ in range(self.num_others):
            assert self.done.acquire(timeout=PATIENCE_S)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting(2)


OPERATIONS: dict[str, Callable[[Any, bool], Any]] = {
    "all_reduce": lambda pg, now: calls.all_reduce(pg, torch.ones(3), now=now),
    "broadcast": lambda pg, now: calls.broadcast(pg, torch.ones(3), 1, now=now),
    "all_gather": lambda pg, now: calls.all_gather_single(pg, torch.ones(9), torch.ones(3), now=now),
    "reduce_scatter": lambda pg, now: calls.reduce_scatter_single(pg, torch.ones(1), torch.ones(3), now=now),
    "all_to_all": lambda pg, now: calls.all_to_all_single(pg, torch.ones(3), torch.ones(3), now=now),
    "barrier": lambda pg, now: calls.barrier(pg, now=now),
    "receive from rank 1, tag 7": lambda pg, now: pg.recv([torch.ones(3)], 1, 7),
}


@pytest.mark.parametrize(
    ("operation", "now"), [("all_reduce", True), ("all_to_all", False), ("receive from rank 1, tag 7", True)]
)
@world(3, backend="shm")
def test_a_rank_that_never_comes_is_named_by_the_deadline_with_what_it_did_last(
    mesh, meeting, operation, now
):
    pg = group_of(mesh)
    pg.set_timeout(timedelta(seconds=1))
    began = time.monotonic()
    if mesh.rank == 1:
        pg.label = "the exchange of a test"
    calls.barrier(pg).wait()
    if mesh.rank == 1:
        meeting.stay_away()
        return
    try:
        with pytest.raises(PeerLost) as lost:
            OPERATIONS[operation](pg, now).wait()
    finally:
        meeting.done.release()
    waited_s = time.monotonic() - began
    assert 0.9 < waited_s < SOON_S
    assert (lost.value.ranks, lost.value.operation) == ((1,), operation)
    told = rf"rank {mesh.rank} waited [\d.]+ s in {operation}, and never came: rank 1 \(pid "
    assert re.search(told, str(lost.value))
    sentence, *table = str(lost.value).splitlines()
    assert ", alive, after the exchange of a test, at shm/test_lost.py:" in sentence
    if not table:
        assert sentence.endswith(f". Rank {2 - mesh.rank} shows where each rank stands")
        return
    _, first, *lines = table
    assert first.split()[:3] == ["1", "never", "came;"]
    assert {line.split()[0] for line in lines[:2]} == {"0", "2"}
    assert any(line.startswith("    shm/test_lost.py:") and " stay_away" in line for line in lines)


@pytest.fixture
def over() -> threading.Barrier:
    return threading.Barrier(4)


@world(4, backend="shm")
def test_a_monitored_barrier_names_all_who_are_missing(mesh, over):
    pg = group_of(mesh)
    pg.monitored_barrier()
    if mesh.rank in (0, 2):
        with pytest.raises(PeerLost) as lost:
            pg.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        assert sorted(lost.value.ranks) == [1, 3]
    over.wait(PATIENCE_S)


@world(3, backend="shm", timeout_s=20)
@pytest.mark.parametrize(
    ("operation", "how"), [("barrier", "shutdown"), ("receive from rank 1, tag 7", "dropped")]
)
def test_a_rank_that_leaves_is_named_at_once(mesh, store, operation, how):
    pg = join(store, mesh.rank)
    calls.barrier(pg).wait()
    if mesh.rank == 1:
        if how == "shutdown":
            pg.shutdown()
        del pg
        gc.collect()
        return
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        OPERATIONS[operation](pg, True).wait()
    assert time.monotonic() - began < SOON_S
    assert (lost.value.ranks, lost.value.operation) == ((1,), operation)
    assert f"rank {mesh.rank} waited in {operation} for rank 1, which left the group" in str(lost.value)


@world(3, backend="shm", timeout_s=20)
def test_a_rank_that_fails_tells_the_others_why(mesh, monkeypatch):
    pg = group_of(mesh)
    if mesh.rank == 1:

        def fail(*args, **kwargs):
            raise MemoryError("no more room for anything")

        monkeypatch.setattr(pg._rounds, "announce", fail)
        with pytest.raises(MemoryError):
            calls.all_reduce(pg, torch.ones(3)).wait()
        return
    began = time.monotonic()
    work = calls.all_reduce(pg, torch.ones(3), now=False)
    later = [calls.barrier(pg, now=False) for _ in range(3)]
    for waiting in (work, *later):
        with pytest.raises(PeerLost, match="rank 1, which failed: MemoryError: no more room") as lost:
            waiting.wait()
        assert lost.value.ranks == (1,)
    assert time.monotonic() - began < SOON_S
    for operation in OPERATIONS.values():  # and so does everything that follows
        with pytest.raises(PeerLost, match="rank 1, which failed: MemoryError"):
            operation(pg, True).wait()


@world(2, backend="shm", timeout_s=20)
def test_an_abort_ends_what_is_under_way(mesh, store):
    pg = join(store, mesh.rank, 2)
    if mesh.rank == 1:
        calls.barrier(group_of(mesh)).wait()
        return
    works = [calls.all_reduce(pg, torch.ones(3), now=False), pg.recv([torch.ones(3)], 1, 0)]
    began = time.monotonic()
    pg.abort()
    for work in works:
        with pytest.raises(PeerLost):
            work.wait()
    assert time.monotonic() - began < SOON_S
    calls.barrier(group_of(mesh)).wait()


@world(2, backend="shm", timeout_s=20)
def test_who_has_come_may_leave_before_the_others_have_seen_it(mesh, store):
    for n in range(30):
        pg = join(dist.PrefixStore(str(n), store), mesh.rank, 2)
        x = torch.full((1000,), mesh.rank + 1.0)
        calls.all_reduce(pg, x).wait()
        if mesh.rank == n % 2:
            pg.shutdown()
        assert set(x.tolist()) == {3.0}


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def join(store: dist.Store, rank: int, size: int = 3) -> Any:
    return connect(store, rank, size, timedelta(seconds=PATIENCE_S))
