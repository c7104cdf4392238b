"""The control channel carries JSON of limited length, and the store ends its waits with the generation."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.heartbeat import HeartbeatPage
from instep.elastic.rendezvous import MESSAGE_BYTES, Assignment, ControlChannel, WatchedStore, WorkerSpec
from instep.elastic.snapshot import Snapshot, SnapshotHandle
from instep.errors import PeerLost
from instep.launch.memory_file import MemoryFile

numbers = st.integers(0, 2**40)
files = st.builds(MemoryFile, numbers, numbers, numbers)
NOWHERE = MemoryFile(0, 0, 0)
assignments = st.builds(
    Assignment,
    generation=numbers,
    rank=numbers,
    world_size=numbers,
    store=files,
    memory=st.lists(
        st.builds(SnapshotHandle, files, numbers, numbers, numbers),
        max_size=3,
    ).map(tuple),
)


@dataclass
class Ends:
    """Both ends of a control channel: a worker's, and its supervisor's."""

    channel: ControlChannel
    page: HeartbeatPage
    ours: Connection

    def heard(self) -> dict:
        assert self.ours.poll()
        return json.loads(self.ours.recv_bytes())


@pytest.fixture
def ends(page: HeartbeatPage) -> Iterator[Ends]:
    ours, theirs = Pipe()
    yield Ends(ControlChannel(WorkerSpec(2, page.file, theirs)), page, ours)
    ours.close()
    theirs.close()


@given(assignments)
def test_an_assignment_travels(assignment: Assignment) -> None:
    assert Assignment.from_bytes(assignment.to_bytes()) == assignment
    assert json.loads(assignment.to_bytes())["rank"] == assignment.rank


def test_a_worker_says_that_it_is_ready_and_why_and_is_assigned_a_rank(ends: Ends) -> None:
    assignment = Assignment(3, 1, 2, NOWHERE)
    ends.ours.send_bytes(assignment.to_bytes())
    assert ends.channel.next_assignment(error="PeerLost: rank 0", step=4) == assignment
    assert ends.heard() == {"say": "ready", "generation": 0, "error": "PeerLost: rank 0", "step": 4}
    assert ends.channel.generation == 3
    ends.channel.say("stepped", step=5)
    assert ends.heard() == {"say": "stepped", "generation": 3, "step": 5}


def test_an_empty_answer_says_that_it_is_not_needed(ends: Ends) -> None:
    ends.ours.send_bytes(b"")
    assert ends.channel.next_assignment() is None
    assert ends.channel.generation == 0


def test_a_supervisor_that_has_ended_is_no_error(ends: Ends) -> None:
    ends.ours.close()
    ends.channel.say("stepped")
    assert ends.channel.next_assignment() is None


def test_an_answer_that_is_too_long_is_not_read(ends: Ends) -> None:
    length = (MESSAGE_BYTES + 1).to_bytes(4, "big")  # as multiprocessing frames a message
    os.write(ends.ours.fileno(), length + b"{" * 100)
    assert ends.channel.next_assignment() is None


def test_a_generation_is_asked_to_part_by_its_number(ends: Ends) -> None:
    ends.ours.send_bytes(Assignment(3, 0, 1, NOWHERE).to_bytes())
    ends.channel.next_assignment()
    assert not ends.channel.regroup
    ends.page.regroup = 2  # the wish of the generation before
    assert not ends.channel.regroup
    ends.page.regroup = 3
    assert ends.channel.regroup


def test_its_heartbeat_is_in_its_own_place(ends: Ends) -> None:
    ends.channel.heartbeat.enter("join")
    assert ends.page.position(2).phase == "join"


def test_a_snapshot_is_handed_over_and_outlives_its_writer(ends: Ends) -> None:
    snapshot = Snapshot.create(10, 64)
    snapshot.write(b"whole", [torch.ones(1)])
    ends.channel.hand_over(snapshot, 1, 3)
    inode = snapshot.mapping.inode
    del snapshot
    assert ends.heard() == {
        "say": "snapshot",
        "generation": 0,
        "inode": inode,
        "rank": 1,
        "num_ranks": 3,
    }
    place = MemoryFile(os.getpid(), reduction.recv_handle(ends.ours), inode)
    assert Snapshot.attach(place).description() == b"whole"
    os.close(place.fd)


def never() -> bool:
    return False


@pytest.fixture
def inner() -> Iterator[dist.Store]:
    return dist.HashStore()


def test_it_passes_everything_on(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)
    store.set("a", "1")
    assert inner.get("a") == store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.check(["a", "n"])
    assert not store.check(["a", "b"])
    assert store.compare_set("a", "1", "2") == b"2"
    assert store.num_keys() == inner.num_keys()
    assert store.delete_key("a")
    assert not inner.check(["a"])


def test_it_can_stand_below_a_prefix(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)  # torch's prefix would not keep it alive
    prefixed = dist.PrefixStore("one", store)
    prefixed.set("a", "1")
    assert inner.get("one/a") == b"1"
    assert prefixed.get("a") == b"1"
    assert prefixed.add("n", 1) == 1
    assert prefixed.check(["n"])


def test_it_waits_for_what_another_thread_writes(inner: dist.Store) -> None:
    asked = threading.Event()

    def is_over() -> bool:
        asked.set()
        return False

    def write() -> None:
        asked.wait()
        inner.set("late", "x")

    writer = threading.Thread(target=write)
    writer.start()
    assert WatchedStore(inner, is_over, 10).get("late") == b"x"
    writer.join()


def test_a_generation_that_ends_ends_the_wait(inner: dist.Store) -> None:
    looks = count()
    store = WatchedStore(inner, lambda: next(looks) >= 3, 10)
    with pytest.raises(PeerLost, match="during the rendezvous") as lost:
        store.wait(["never"])
    assert lost.value.operation == "the rendezvous"
    assert next(looks) == 4


def test_nothing_is_written_for_a_generation_that_is_over(inner: dist.Store) -> None:
    store = WatchedStore(inner, lambda: True, 10)
    with pytest.raises(PeerLost):
        store.set("a", "1")
    with pytest.raises(PeerLost):
        store.add("a", 1)
    assert not inner.check(["a"])


def test_the_deadline_names_what_did_not_come(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)
    with pytest.raises(RuntimeError, match=r"^a, b did not come within 0.01 s$"):
        store.wait(["a", "b"], timedelta(milliseconds=10))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"^c did not come within 0.02 s$"):
        store.clone().get("c")
