"""Operations go on beside the computation, in the order of their issue in a group, and end as torch's do."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.errors import Desync
from instep.shm import ShmGroup, connect
from tests.shm import calls
from tests.shm.calls import PATIENCE_S, group_of
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
def test_groups_do_not_wait_for_each_other(mesh, store):
    """Each rank begins with another one of the groups; on one group this would be a mistake."""
    groups = [join(store, f"group {n}", [0, 1], mesh.rank) for n in range(3)]
    for times in range(20):
        xs = [torch.full((LONG if times == 0 else 5,), n + 1.0) for n in range(3)]
        order = [0, 1, 2] if mesh.rank == 0 else [2, 0, 1]
        works = [calls.all_reduce(groups[n], xs[n], now=False) for n in order]
        for work in reversed(works):
            work.wait()
        assert [x[0].item() for x in xs] == [2, 4, 6]
        assert [x[-1].item() for x in xs] == [2, 4, 6]


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


@world(40, backend="shm", timeout_s=20)
def test_forty_ranks_meet(mesh):
    pg = group_of(mesh)
    x = torch.full((700,), mesh.rank)
    calls.all_reduce(pg, x, now=mesh.rank % 2 == 0).wait()
    assert set(x.tolist()) == {780}
    out = torch.zeros(40, dtype=torch.int64)
    calls.all_to_all_single(pg, out, torch.full((40,), mesh.rank)).wait()
    assert out.tolist() == list(range(40))
