"""Ranks meet in one shared segment or, all of them, use gloo; what a group has taken is given back."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import instep
from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.shm import connect, group_segment, handshake, segment
from instep.shm.group_segment import segment_bytes
from tests.shm import calls
from tests.shm.calls import PATIENCE_S
from tests.world import world


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are told once per process, and no test is to find one that was told before."""
    monkeypatch.setattr(handshake, "_warned_reasons", set())


def is_rank(rank: int) -> bool:
    """Whether the thread that asks is this rank of the world."""
    return threading.current_thread().name == f"rank {rank}"


def cannot_attach(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    original = segment.attach

    def attach(pid: int, fd: int) -> segment.Mapping:
        if is_rank(rank):
            raise PermissionError(13, "Permission denied")
        return original(pid, fd)

    monkeypatch.setattr(segment, "attach", attach)
    return f"rank {rank} cannot open the memory of the first rank: .*Permission denied"


def other_memory(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    original = segment.attach

    def attach(pid: int, fd: int) -> segment.Mapping:
        return segment.create(segment_bytes(3)) if is_rank(rank) else original(pid, fd)

    monkeypatch.setattr(segment, "attach", attach)
    return f"rank {rank} opened other memory than that of rank 0"


def no_such_platform(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    monkeypatch.setattr(handshake, "why_not", lambda: "shm needs another platform" if is_rank(rank) else "")
    return "shm needs another platform"


def another_core(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    native = group_segment.core()
    stranger = SimpleNamespace(stamp="another")
    monkeypatch.setattr(group_segment, "core", lambda: stranger if is_rank(rank) else native)
    return f"rank {rank} has another native core than rank 0"


def cannot_see(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    original = handshake.is_alive
    monkeypatch.setattr(
        handshake, "is_alive", lambda peer: None if is_rank(rank) and peer.rank else original(peer)
    )
    return f"rank {rank} cannot see the process of rank 1"


def no_memory(monkeypatch: pytest.MonkeyPatch, rank: int) -> str:
    def create(nbytes: int) -> segment.Mapping:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment, "create", create)
    return "shared memory|OSError"


@pytest.mark.parametrize(
    ("hindrance", "rank"),
    [
        (cannot_attach, 1),
        (cannot_attach, 2),
        (other_memory, 1),
        (no_such_platform, 0),
        (no_such_platform, 2),
        (another_core, 1),
        (cannot_see, 0),
        (no_memory, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_where_one_rank_cannot_all_use_gloo_and_are_told_why_once(monkeypatch, store, hindrance, rank):
    reason = hindrance(monkeypatch, rank)
    with pytest.warns(
        UserWarning, match=f"ranks \\[0, 1, 2\\] use gloo instead, because .*({reason})"
    ) as told:
        world(3)(falls_back)(store=store)
    assert len([warning for warning in told if "gloo instead" in str(warning.message)]) == 1


def falls_back(mesh, store):
    for n in range(2):
        own = dist.PrefixStore(str(n), store)
        pg = connect(own, mesh.rank, 3, timedelta(seconds=PATIENCE_S))
        assert isinstance(pg, dist.ProcessGroupGloo)
        x = torch.ones(2)
        pg.allreduce([x]).wait()
        assert x.tolist() == [3, 3]


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_never_comes_is_named_by_all_who_came(store, absent):
    world(3)(comes_alone)(store=store, absent=absent, began=time.monotonic())


def comes_alone(mesh, store, absent, began):
    if mesh.rank == absent:
        return
    with pytest.raises(PeerLost, match=f"rank {absent} did not come") as lost:
        connect(store, mesh.rank, 3, timedelta(seconds=0.5))
    assert lost.value.ranks == (absent,)
    assert 0.4 < time.monotonic() - began < PATIENCE_S


def fork_and_go_on(directory: Path) -> None:
    mesh = instep.init(backend="shm", timeout_s=PATIENCE_S)
    dist.barrier()
    if mesh.rank == 1:
        child = os.fork()
        if child == 0:  # takes no part, and leaves by itself, with all that it has inherited
            with pytest.raises(RuntimeError, match="is no member of its groups"):
                dist.barrier()
            dist.destroy_process_group()
            del mesh
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    x = torch.ones(3)
    dist.all_reduce(x)
    (directory / str(dist.get_rank())).write_text(json.dumps(x.tolist()))


def test_a_forked_child_that_ends_does_not_take_its_parent_out_of_the_group(tmp_path):
    launch(fork_and_go_on, (tmp_path,), ranks=2)
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [[2, 2, 2]] * 2


def descriptors() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


def ours() -> dict[str, int]:
    """What groups of this process hold."""
    return {
        "descriptors": sum("memfd:instep" in link for link in descriptors()),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:instep"),
        "threads": sum(thread.name.startswith("instep shm") for thread in threading.enumerate()),
    }


def use(pg: Any, rank: int) -> None:
    """Everything that makes a group start a thread or map memory."""
    x = pg.allocate(400).elements(torch.float32).fill_(1)
    calls.all_reduce(pg, x, now=False).wait()
    works = [pg.send([torch.ones(3)], 1 - rank, 0), pg.recv([torch.ones(3)], 1 - rank, 0)]
    for work in works:
        work.wait()
    calls.barrier(pg).wait()


def test_groups_that_are_dropped_leave_no_thread_descriptor_or_mapping(store):
    gc.collect()
    before = ours()
    world(2)(makes_and_drops)(store=store, times=100)
    until = time.monotonic() + PATIENCE_S
    while ours() != before and time.monotonic() < until:
        gc.collect()  # what a thread has just let go
    assert ours() == before


def makes_and_drops(mesh, store, times):
    for n in range(times):
        own = dist.PrefixStore(str(n), store)
        pg: Any = connect(own, mesh.rank, 2, timedelta(seconds=PATIENCE_S))
        if n % 10 == 0:
            use(pg, mesh.rank)
        else:
            calls.barrier(pg).wait()
        if n % 20 == 0:
            pg.shutdown()
        if n % 30 == 0:
            pg.cycle = [pg]
