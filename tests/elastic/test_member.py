"""The line between a worker and its supervisor: JSON of limited length, and silence that ends it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.member import MESSAGE_BYTES, Desk, Member, Seat
from instep.elastic.memory import Copy, Kept, Place
from instep.elastic.page import Page

numbers = st.integers(0, 2**40)
seats = st.builds(
    Seat,
    generation=numbers,
    rank=numbers,
    world_size=numbers,
    store=st.text(),
    memory=st.lists(
        st.builds(Kept, st.builds(Place, numbers, numbers, numbers), numbers, numbers, numbers), max_size=3
    ).map(tuple),
)


@dataclass
class Line:
    """A member, and the supervisor's end of its line."""

    member: Member
    page: Page
    ours: Connection

    def heard(self) -> dict:
        assert self.ours.poll()
        return json.loads(self.ours.recv_bytes())


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    page = Page(tmp_path / "page", create=True)
    ours, theirs = Pipe()
    yield Line(Member(Desk(2, page.path, theirs)), page, ours)
    ours.close()
    theirs.close()


@given(seats)
def test_a_seat_travels(seat: Seat) -> None:
    assert Seat.from_bytes(seat.to_bytes()) == seat
    assert json.loads(seat.to_bytes())["rank"] == seat.rank


def test_a_worker_asks_says_why_and_sits(line: Line) -> None:
    seat = Seat(3, 1, 2, "store")
    line.ours.send_bytes(seat.to_bytes())
    assert line.member.sit(error="PeerLost: rank 0", step=4) == seat
    assert line.heard() == {"say": "free", "generation": 0, "error": "PeerLost: rank 0", "step": 4}
    assert line.member.generation == 3
    line.member.say("stepped", step=5)
    assert line.heard() == {"say": "stepped", "generation": 3, "step": 5}


def test_an_empty_answer_says_that_it_is_not_needed(line: Line) -> None:
    line.ours.send_bytes(b"")
    assert line.member.sit() is None
    assert line.member.generation == 0


def test_a_supervisor_that_has_ended_is_no_error(line: Line) -> None:
    line.ours.close()
    line.member.say("stepped")
    assert line.member.sit() is None


def test_an_answer_that_is_too_long_is_not_read(line: Line) -> None:
    length = (MESSAGE_BYTES + 1).to_bytes(4, "big")  # as multiprocessing frames a message
    os.write(line.ours.fileno(), length + b"{" * 100)
    assert line.member.sit() is None


def test_a_generation_is_asked_to_part_by_its_number(line: Line) -> None:
    line.ours.send_bytes(Seat(3, 0, 1, "").to_bytes())
    line.member.sit()
    assert not line.member.regroup
    line.page.regroup = 2  # the wish of the generation before
    assert not line.member.regroup
    line.page.regroup = 3
    assert line.member.regroup


def test_its_pulse_is_in_its_own_place(line: Line) -> None:
    line.member.pulse.enter("join")
    assert line.page.position(2).phase == "join"


def test_memory_is_handed_over_and_outlives_whoever_made_it(line: Line) -> None:
    copy = Copy.create(10, 64)
    copy.write(b"whole", [torch.ones(1)])
    line.member.hand_over(copy, 1, 3)
    inode = copy.mapping.inode
    del copy
    assert line.heard() == {
        "say": "memory",
        "generation": 0,
        "inode": inode,
        "rank": 1,
        "num_ranks": 3,
    }
    place = Place(os.getpid(), reduction.recv_handle(line.ours), inode)
    assert Copy.attach(place).description() == b"whole"
    os.close(place.fd)
