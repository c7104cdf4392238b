"""Ranks that meet by messages: what is sent comes before it is asked for, and a rank that ends is noticed."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from instep.comm.meeting_place import LINE_BYTES, WORD_BYTES, MeetingPlace
from instep.errors import PeerLost
from tests.world import world

ROOM = 64 * LINE_BYTES


def meet(mesh, words: list[int], room: int = ROOM) -> list[list[int]]:
    """What every rank has sent of these."""
    group = mesh.world.group
    place = MeetingPlace.of(group)
    sent = torch.tensor(words)
    as_words(place.enter(room))[1 : 1 + len(words)] = sent
    found = place.exchange(group, 1 + len(words), "the test")
    return [as_words(row)[1:count].tolist() for row, count in zip(place.rows, found, strict=True)]


def as_words(row: Tensor) -> Tensor:
    return row[: len(row) // WORD_BYTES * WORD_BYTES].view(torch.int64)


@world(3)
def test_ranks_send_as_many_words_as_they_like(mesh):
    for number in range(6):
        expected = [[number, 10 * rank, *range((rank + number) % 3)] for rank in range(3)]
        assert meet(mesh, expected[mesh.rank]) == expected


def test_what_is_sent_has_come_before_it_is_asked_for():
    world(2)(comes_first)(reads=threading.Event())


def comes_first(mesh, reads: threading.Event):
    meet(mesh, [1])
    if mesh.rank == 0:
        assert meet(mesh, [2]) == [[2], [3]]
        assert reads.is_set()
        return
    place = MeetingPlace.of(mesh.world.group)
    following = as_words(place._by_turns[(place._number + 1) % 2][0])
    until = time.monotonic() + 5
    while following[:3].tolist() != [3, 2, place._number + 1]:
        assert time.monotonic() < until, "it waits until it is asked for"
        reads.wait(0.001)
    reads.set()
    assert meet(mesh, [3]) == [[2], [3]]


@world(2)
def test_more_room_is_there_from_the_next_meeting_but_one_on(mesh):
    rooms = []
    for number in range(5):
        place = MeetingPlace.of(mesh.world.group)
        meet(mesh, [number], ROOM if number < 2 else 4 * ROOM)
        rooms.append(place.rows.shape[1])
    assert rooms == [ROOM, ROOM, ROOM, 4 * ROOM, 4 * ROOM]
    assert meet(mesh, [7] * (2 * ROOM // WORD_BYTES), 4 * ROOM)[1 - mesh.rank][-1] == 7


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
    if mesh.rank == 1:
        group.close()
        met.wait(10)
        return
    met.wait(10)
    began = time.monotonic()
    with pytest.raises(PeerLost):
        meet(mesh, [2])
    assert time.monotonic() - began < group.timeout_s / 2
