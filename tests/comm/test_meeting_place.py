"""Ranks that meet by messages: what is sent comes before it is asked for, and a rank that ends is noticed."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from instep.comm.meeting_place import LINE_BYTES, WORD_BYTES, MeetingPlace
from instep.errors import Desync, PeerLost
from tests.world import world

ROOM = 64 * LINE_BYTES


def meet(mesh, words: list[int], room: int = ROOM) -> list[list[int]]:
    """What every rank has sent of these."""
    group = mesh.world.group
    place = MeetingPlace.of(group)
    rows = place.enter(room)
    as_words(rows[mesh.rank])[1 : 1 + len(words)] = torch.tensor(words)
    found = place.exchange(group, 1 + len(words), "the test")
    return [as_words(row)[1:count].tolist() for row, count in zip(rows, found, strict=True)]


def as_words(row: Tensor) -> Tensor:
    return row[: len(row) // WORD_BYTES * WORD_BYTES].view(torch.int64)


@world(3)
def test_ranks_send_as_many_words_as_they_like(mesh):
    for number in range(6):
        expected = [[number, 10 * rank, *range((rank + number) % 3)] for rank in range(3)]
        assert meet(mesh, expected[mesh.rank]) == expected


def test_what_is_sent_has_come_before_it_is_asked_for():
    world(2)(comes_first)(has_come=threading.Event())


def comes_first(mesh, has_come: threading.Event):
    meet(mesh, [1])
    if mesh.rank == 0:
        assert meet(mesh, [2]) == [[2], [3]]
        assert has_come.is_set()
        return
    following = as_words(MeetingPlace.of(mesh.world.group)._by_turns[2 % 2][0])
    until = time.monotonic() + 5
    while following[:3].tolist() != [3, 2, 2]:  # words, the word, the meeting
        assert time.monotonic() < until, "it waits until it is asked for"
        has_come.wait(0.001)
    has_come.set()
    assert meet(mesh, [3]) == [[2], [3]]


@world(2)
def test_more_room_is_there_from_the_next_meeting_on(mesh):
    place, rooms = MeetingPlace.of(mesh.world.group), []
    for number in range(1, 6):
        meet(mesh, [number], ROOM if number < 3 else 4 * ROOM - 1)
        rooms.append(place._by_turns[number % 2].shape[1])
    assert rooms == [ROOM, ROOM, ROOM, 4 * ROOM, 4 * ROOM]
    assert meet(mesh, [7] * (2 * ROOM // WORD_BYTES), 4 * ROOM)[1 - mesh.rank][-1] == 7


@world(2)
def test_what_there_is_no_room_for_is_refused_and_the_others_wait_for_another_try(mesh):
    group = mesh.world.group
    place = MeetingPlace.of(group)
    if mesh.rank == 0:
        place.enter(ROOM)
        with pytest.raises(ValueError, match=f"the test: expected at most {ROOM} bytes"):
            place.exchange(group, ROOM // WORD_BYTES, "the test")
    assert meet(mesh, [mesh.rank]) == [[0], [1]]


@world(2)
def test_one_that_was_entered_only_has_not_been(mesh):
    for number in range(4):
        if mesh.rank == 0:
            MeetingPlace.of(mesh.world.group).enter(ROOM)
        assert meet(mesh, [number, mesh.rank]) == [[number, 0], [number, 1]]


@world(2)
def test_messages_of_other_meetings_are_refused_on_both_sides(mesh):
    meet(mesh, [1])
    MeetingPlace.of(mesh.world.group)._number += 2 * mesh.rank
    with pytest.raises(Desync, match=f"is not of meeting {2 + 2 * mesh.rank} of this rank"):
        meet(mesh, [2])


@world(2)
@pytest.mark.parametrize("in_inference_mode", [True, False])
def test_memory_may_be_made_where_tensors_are_for_inference_only(mesh, in_inference_mode):
    with torch.inference_mode(in_inference_mode):
        meet(mesh, [1])
    assert meet(mesh, [mesh.rank]) == [[0], [1]]


@world(2)
def test_all_users_of_a_group_meet_in_one_place(mesh):
    group = mesh.world.group
    assert MeetingPlace.of(group) is MeetingPlace.of(group)
    other = mesh.world.duplicate()
    assert MeetingPlace.of(other) is not MeetingPlace.of(group)
    other.close()


@world(2)
def test_what_is_used_is_told_of_and_no_more(mesh):
    place = MeetingPlace.of(mesh.world.group)
    assert place.buffers == []
    for number in range(3):
        meet(mesh, [number])
    assert [x.nbytes for x in place.buffers] == [3 * WORD_BYTES] * 4  # of two ranks, by turns
    assert all(x.untyped_storage().nbytes() <= ROOM for x in place.buffers)


def test_a_rank_that_closes_its_group_is_noticed_at_once():
    world(2, timeout_s=20)(closes)(met=threading.Barrier(2))


def closes(mesh, met: threading.Barrier):
    group = mesh.world.group
    meet(mesh, [1])
    place = MeetingPlace.of(group)
    if mesh.rank == 1:
        group.close()
        met.wait(10)  # for the other one to be through
        assert place._offered is None
        return
    began = time.monotonic()
    with pytest.raises(PeerLost):
        meet(mesh, [2])
    assert time.monotonic() - began < group.timeout_s / 2
    met.wait(10)
