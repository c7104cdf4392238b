"""Buffers for gathered weights: used again, never more than were taken at once, left to the views of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.launch.process_memory import resident_memory
from instep.mesh.mesh import Mesh
from instep.shard import buffer_pool
from instep.shard.buffer_pool import MAPPED_BYTES, BufferPool
from tests.parity import filled
from tests.shard.test_unit import unit_of
from tests.world import world

CPU = torch.device("cpu")
SIZE = 8 * MAPPED_BYTES


def test_a_buffer_that_was_given_back_is_the_next_one_of_its_size() -> None:
    pool = BufferPool()
    first = pool.take(SIZE, CPU)
    second = pool.take(SIZE, CPU)
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 64 == 0
    pool.give_back(first)
    assert pool.free_bytes == SIZE
    assert pool.take(SIZE, CPU).data_ptr() == first.data_ptr()
    assert pool.free_bytes == 0


def test_buffers_of_many_sizes_are_never_more_bytes_than_were_taken_at_once() -> None:
    pool = BufferPool()
    for i in range(1, 9):
        pool.give_back(pool.take(i * MAPPED_BYTES, CPU))
        assert pool.free_bytes == i * MAPPED_BYTES
    small = pool.take(MAPPED_BYTES, CPU)
    assert pool.free_bytes <= 7 * MAPPED_BYTES
    pool.give_back(small)
    pool.clear()
    assert pool.free_bytes == 0


def test_what_was_left_to_others_is_not_taken_again() -> None:
    pool = BufferPool()
    buffer = pool.take(SIZE, CPU)
    view = buffer[5:]
    pool.hand_over(buffer)
    assert pool.free_bytes == 0
    assert pool.take(SIZE, CPU).data_ptr() != buffer.data_ptr()
    view.fill_(7)
    del buffer
    assert (view == 7).all()


@pytest.mark.parametrize("nbytes", [0, 1, MAPPED_BYTES - 1])
def test_small_buffers_come_from_the_allocator(nbytes: int) -> None:
    pool = BufferPool()
    buffer = pool.take(nbytes, CPU)
    assert buffer.nbytes == nbytes
    pool.give_back(buffer)
    assert pool.free_bytes == 0


def test_buffers_that_rest_are_taken_again_and_may_be_written_to() -> None:
    pool = BufferPool()
    buffer = pool.take(SIZE, CPU)
    place = buffer.data_ptr()
    pool.give_back(buffer)
    del buffer
    pool.rest()
    assert pool.free_bytes == SIZE
    buffer = pool.take(SIZE, CPU)
    assert buffer.data_ptr() == place
    assert (buffer.fill_(3) == 3).all()


@pytest.mark.parametrize("left", [True, False])
def test_memory_is_the_system_s_again_after_clear_or_with_its_last_view(left: bool) -> None:
    pool, size = BufferPool(), 128 * MAPPED_BYTES
    before = _resident()
    buffer = pool.take(size, CPU)
    buffer.fill_(1)
    assert _resident() > before + 0.9 * size
    (pool.hand_over if left else pool.give_back)(buffer)
    del buffer
    assert left or _resident() > before + 0.9 * size
    pool.clear()
    assert _resident() < before + 0.1 * size


def _resident() -> int:
    found = resident_memory()
    if found is None:
        pytest.skip("the kernel does not tell what is resident")
    return found.now


@world(1)
def test_units_take_each_other_s_buffers_but_not_those_that_have_views(mesh: Mesh) -> None:
    pool = BufferPool()
    one, other = (unit_of(filled(nn.Linear(600, 600)), mesh, buffers=pool) for _ in range(2))
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
    place = _place(other)
    one.share("new values")
    assert pool.free_bytes > 0
    assert [_place(unit) for unit in (one, other)] == [place] * 2
    for unit in (one, other):
        unit.group.close()


def _place(unit) -> int:  # type: ignore[no-untyped-def]
    unit.open()
    unit.show()
    place = unit.flat.data_ptr()
    unit.flat.zero_()
    unit.free()
    return place


def test_where_there_is_no_memory_free_buffers_go_first_and_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(nbytes: int) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    pool = BufferPool()
    taken = pool.take(SIZE, CPU)
    pool.give_back(pool.take(2 * SIZE, CPU))
    monkeypatch.setattr(buffer_pool, "_mapped", no_memory)
    with pytest.raises(RuntimeError, match=r"not enough memory: 8,388,608 bytes"):
        pool.take(SIZE, CPU)
    assert pool.free_bytes == 0
    monkeypatch.undo()
    pool.give_back(pool.take(SIZE, CPU))
    pool.give_back(taken)
    assert pool.free_bytes == 2 * SIZE
