"""The control channel carries JSON of limited length, and the store ends its waits with the generation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.heartbeat import HeartbeatPage
from instep.elastic.rendezvous import MESSAGE_BYTES, Assignment, ControlChannel, WorkerSpec
from instep.elastic.snapshot import Snapshot, SnapshotHandle
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
