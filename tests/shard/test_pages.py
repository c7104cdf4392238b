"""Rooms for gathered weights: used again, never more than were taken at once, left to who has a view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.mesh.resident import resident
from instep.shard import pages
from instep.shard.pages import MAPPED_BYTES, Rooms
from tests.parity import filled
from tests.shard.test_unit import unit_of
from tests.world import world

CPU = torch.device("cpu")
SIZE = 8 * MAPPED_BYTES


def test_a_room_that_was_given_back_is_the_next_one_of_its_size() -> None:
    rooms = Rooms()
    first = rooms.take(SIZE, CPU)
    second = rooms.take(SIZE, CPU)
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 64 == 0
    rooms.give(first)
    assert rooms.free_bytes == SIZE
    assert rooms.take(SIZE, CPU).data_ptr() == first.data_ptr()
    assert rooms.free_bytes == 0


def test_rooms_of_many_sizes_are_never_more_bytes_than_were_taken_at_once() -> None:
    rooms = Rooms()
    for i in range(1, 9):
        rooms.give(rooms.take(i * MAPPED_BYTES, CPU))
        assert rooms.free_bytes == i * MAPPED_BYTES
    small = rooms.take(MAPPED_BYTES, CPU)
    assert rooms.free_bytes <= 7 * MAPPED_BYTES
    rooms.give(small)
    rooms.drop()
    assert rooms.free_bytes == 0


def test_what_was_left_to_others_is_not_taken_again() -> None:
    rooms = Rooms()
    room = rooms.take(SIZE, CPU)
    view = room[5:]
    rooms.leave(room)
    assert rooms.free_bytes == 0
    assert rooms.take(SIZE, CPU).data_ptr() != room.data_ptr()
    view.fill_(7)
    del room
    assert (view == 7).all()


@pytest.mark.parametrize("nbytes", [0, 1, MAPPED_BYTES - 1])
def test_small_rooms_come_from_the_allocator(nbytes: int) -> None:
    rooms = Rooms()
    room = rooms.take(nbytes, CPU)
    assert room.nbytes == nbytes
    rooms.give(room)
    assert rooms.free_bytes == 0


@pytest.mark.parametrize("left", [True, False])
def test_memory_is_the_system_s_again_after_drop_or_with_its_last_view(left: bool) -> None:
    rooms, size = Rooms(), 128 * MAPPED_BYTES
    before = _resident()
    room = rooms.take(size, CPU)
    room.fill_(1)
    assert _resident() > before + 0.9 * size
    (rooms.leave if left else rooms.give)(room)
    del room
    assert left or _resident() > before + 0.9 * size
    rooms.drop()
    assert _resident() < before + 0.1 * size


def _resident() -> int:
    found = resident()
    if found is None:
        pytest.skip("the kernel does not tell what is resident")
    return found.now


@world(1)
def test_units_take_each_other_s_rooms_and_leave_those_that_somebody_looks_at(mesh: Mesh) -> None:
    rooms = Rooms()
    one, other = (unit_of(filled(nn.Linear(600, 600)), mesh, rooms=rooms) for _ in range(2))
    places = [_place(unit) for unit in (one, other)]
    assert places[0] == places[1]
    one.open()
    one.flat.copy_(one.slice)
    one.show()
    kept: Tensor = one.parameters[0].detach()
    values = kept.clone()
    one.free()
    assert _place(other) != places[0]
    assert torch.equal(kept, values)
    one.share("new values")
    assert rooms.free_bytes == 0
    for unit in (one, other):
        unit.group.close()


def _place(unit) -> int:  # type: ignore[no-untyped-def]
    unit.open()
    unit.show()
    place = unit.flat.data_ptr()
    unit.flat.zero_()
    unit.free()
    return place


def test_where_there_is_no_memory_free_rooms_go_first_and_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(nbytes: int) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    rooms = Rooms()
    taken = rooms.take(SIZE, CPU)
    rooms.give(rooms.take(2 * SIZE, CPU))
    monkeypatch.setattr(pages, "_mapped", no_memory)
    with pytest.raises(RuntimeError, match=r"not enough memory: 8,388,608 bytes"):
        rooms.take(SIZE, CPU)
    assert rooms.free_bytes == 0
    monkeypatch.undo()
    rooms.give(rooms.take(SIZE, CPU))
    rooms.give(taken)
    assert rooms.free_bytes == 2 * SIZE
