"""The memory copy: whole whoever dies in its middle, there after its writer, and cheap enough."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.elastic import memory
from instep.elastic.memory import Copy, Interval, Place, common_step, tensor_bytes

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.float32),
    ((0, 3), torch.float32),
    ((5,), torch.bfloat16),
    ((3, 7), torch.float64),
    ((2, 2, 2), torch.int64),
    ((9,), torch.bool),
]


def state(number: int) -> list[Tensor]:
    """Tensors in which every element tells the number."""
    return [torch.full(shape, number, dtype=dtype) for shape, dtype in SHAPES]


def description(number: int) -> bytes:
    return f"state {number}".encode() * (1 + number % 3)


def filled(*numbers: int) -> Copy:
    copy = Copy.create(100, tensor_bytes(state(0)))
    for number in numbers:
        copy.write(description(number), state(number))
    return copy


def assert_holds(copy: Copy, number: int) -> None:
    """Description and tensors are those of one and the same write."""
    assert copy.description() == description(number)
    found = state(-1)
    copy.read_into(found)
    for one, expected in zip(found, state(number), strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


def test_nothing_is_in_a_new_one() -> None:
    assert Copy.create(10, 10).description() is None


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
@settings(max_examples=30)
def test_the_last_one_written_is_the_one_that_is_read(numbers: list[int]) -> None:
    assert_holds(filled(*numbers), numbers[-1])


def test_a_rank_that_owns_nothing_has_a_copy_all_the_same() -> None:
    copy = Copy.create(100, 0)
    copy.write(b"of step 3", [], 3)
    copy.read_into([])
    assert (copy.description(), list(copy.halves)) == (b"of step 3", [3])


def test_live_tensors_of_any_layout_are_copied_without_autograd() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    turned = torch.arange(6.0).view(2, 3).t()
    copy = Copy.create(8, tensor_bytes([weight, turned]))
    copy.write(b"", [weight, turned])
    with torch.no_grad():
        weight.zero_()
    found = [torch.empty(2, 3), torch.empty(3, 2)]
    copy.read_into(found)
    assert found[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(found[1], turned)


def test_it_says_what_fits() -> None:
    copy = Copy.create(10, 128)
    assert copy.fits(b"x" * 10, [torch.zeros(32)])
    assert not copy.fits(b"x" * 1000, [torch.zeros(1)])
    assert not copy.fits(b"", [torch.zeros(33)])
    assert not copy.fits(b"", [torch.zeros(1)] * 3)  # each begins on a line of its own


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(0, 500))
@settings(max_examples=50)
def test_what_fits_touches_neither_the_other_half_nor_what_lies_behind(sizes: list[int], length: int) -> None:
    tensors = [torch.full((size,), i + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]
    copy = Copy.create(length, tensor_bytes(tensors))
    first, second = b"a" * length, b"b" * length
    assert copy.fits(first, tensors)
    copy.write(first, tensors)
    copy.write(second, [x + 100 for x in tensors])
    copy._words.post(0, copy._words[0] - 1)  # the other half, as it was
    assert copy.description() == first
    found = [torch.empty_like(x) for x in tensors]
    copy.read_into(found)
    assert all(map(torch.equal, found, tensors))


class Died(Exception):
    """Instead of a process."""


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("copied", range(len(SHAPES) + 1))
def test_a_write_that_ends_in_the_middle_leaves_the_old_one_whole(
    written: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumerated: after none, one, ... all of the tensors."""
    copy = filled(*range(written))

    def die_after(into: list[Tensor], tensors: list[Tensor]) -> None:
        for x, y in list(zip(into, tensors, strict=True))[:copied]:
            x.copy_(y)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", die_after)
        with pytest.raises(Died):
            copy.write(description(50), state(50))
    assert_holds(copy, written - 1)
    copy.write(description(51), state(51))
    assert_holds(copy, 51)


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    """A process that does ``target(connection, *args)``, and does not outlive the block."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *args))
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.kill()
        child.join()
        ours.close()


def write_and_wait(connection: Connection) -> None:
    copy = filled(4)
    connection.send([os.getpid(), copy.mapping.fd, copy.mapping.inode])
    reduction.send_handle(connection, copy.mapping.fd, None)
    connection.recv()


def test_another_process_reads_and_writes_it() -> None:
    with process(write_and_wait) as connection:
        copy = Copy.attach(Place(*connection.recv()))
        assert_holds(copy, 4)
        copy.write(description(5), state(5))
        assert_holds(copy, 5)


def test_it_is_there_after_its_writer_and_gone_after_the_last_who_holds_it() -> None:
    with process(write_and_wait) as connection:
        theirs = Place(*connection.recv())
        ours = Place(os.getpid(), reduction.recv_handle(connection), theirs.inode)
    with pytest.raises(OSError, match=r"."):
        Copy.attach(theirs)
    assert_holds(Copy.attach(ours), 4)
    os.close(ours.fd)
    with pytest.raises(OSError, match=r"."):
        Copy.attach(ours)


def place_of(copy: Copy) -> Place:
    return Place(os.getpid(), copy.mapping.fd, copy.mapping.inode)


def test_other_memory_behind_the_same_number_is_refused() -> None:
    place = place_of(copy := filled(1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not the memory that it was"):
        Copy.attach(replace(place, inode=place.inode + 1))
    assert len(os.listdir("/proc/self/fd")) == before
    assert_holds(copy, 1)


def test_it_has_no_name_and_goes_with_the_last_who_looks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    copy = filled(1)
    assert "memfd:instep" in os.readlink(f"/proc/self/fd/{copy.mapping.fd}")
    del copy
    assert len(os.listdir("/proc/self/fd")) == before


def killed_while_copying(connection: Connection, place: Place, before: int) -> None:
    """Write state after state, and be killed in the copying of the ``before``-th, half-way."""
    copy = Copy.attach(place)
    original = torch._foreach_copy_

    def deadly(into: list[Tensor], tensors: list[Tensor]) -> None:
        if int(tensors[0]) == before:
            original(into[:3], tensors[:3])
            os.kill(os.getpid(), signal.SIGKILL)
        original(into, tensors)

    torch._foreach_copy_ = deadly
    for number in range(1, 10):
        copy.write(description(number), state(number))


@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_process_that_is_killed_in_a_write_leaves_the_old_one(before: int) -> None:
    copy = filled(0)
    with process(killed_while_copying, place_of(copy), before) as connection, pytest.raises(EOFError):
        connection.recv()  # until it is gone
    assert_holds(copy, before - 1)
    copy.write(description(77), state(77))
    assert_holds(copy, 77)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [0.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    return now


def copies(interval: Interval, clock: list[float], costs: Callable[[int], float], steps: int) -> list[int]:
    """The steps after which a copy is made, if a step takes 0.1 s."""
    made = []
    for step in range(1, steps + 1):
        if interval.due(step):
            with interval.copying(step, 0.1):
                clock[0] += costs(len(made))
            made.append(step)
    return made


def test_a_cheap_copy_is_made_after_every_step(clock: list[float]) -> None:
    assert copies(Interval(0.02), clock, lambda number: 0.0019, 10) == list(range(1, 11))


@given(st.floats(1e-4, 2.0), st.floats(0.005, 0.5))
@settings(max_examples=50)
def test_copies_take_no_more_than_their_share_of_the_time(cost_s: float, share: float) -> None:
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.time, "monotonic", lambda: clock[0])
        steps = 2000
        made = copies(Interval(share), clock, lambda number: cost_s, steps)
    assert made[:2] == [1, 2]  # the first one does not count, the second one tells
    assert (len(made) - 2) * cost_s <= share * 0.1 * steps * 1.001
    gaps = {b - a for a, b in pairwise(made[1:])}
    assert len(gaps) <= 1
    # No sparser than need be: one step less would be over the share.
    assert all(gap == 1 or cost_s > share * 0.1 * (gap - 1) * 0.999 for gap in gaps)


def test_the_first_copy_into_new_pages_does_not_count(clock: list[float]) -> None:
    made = copies(Interval(0.02), clock, lambda number: 0.0019 if number else 5.0, 10)
    assert made == list(range(1, 11))


def test_one_slow_copy_is_followed_by_a_pause_and_forgotten(clock: list[float]) -> None:
    costs = {1: 0.0199, 2: 0.0019}
    assert copies(Interval(0.02), clock, lambda number: costs.get(number, 0.0199), 15) == [
        1,
        2,
        12,
        13,
        14,
        15,
    ]


def test_each_half_says_of_which_step_it_is() -> None:
    copy = Copy.create(100, tensor_bytes(state(0)))
    assert copy.halves == {}
    for step in (3, 5, 9):
        copy.write(description(step), state(step), step)
    assert sorted(copy.halves) == [5, 9]
    for step, half in copy.halves.items():
        assert copy.description(half) == description(step)


@pytest.mark.parametrize("copied", range(len(SHAPES) + 1))
def test_a_half_that_was_being_written_is_of_no_step(copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = filled()
    for step in (1, 2):
        copy.write(description(step), state(step), step)

    def die_after(into: list[Tensor], tensors: list[Tensor]) -> None:
        for x, y in list(zip(into, tensors, strict=True))[:copied]:
            x.copy_(y)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", die_after)
        with pytest.raises(Died):
            copy.write(description(3), state(3), 3)
    assert list(copy.halves) == [2]


@given(st.data())
@settings(max_examples=60)
def test_wherever_ranks_are_killed_they_leave_a_step_that_all_have(data: st.DataObject) -> None:
    """No rank begins a copy before all have ended the one before; no more is known of their speeds."""
    num_ranks, last = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    copies = [filled() for _ in range(num_ranks)]
    for step in range(1, last):
        for copy in copies:
            copy.write(description(step), state(step), step)
    for copy in copies:
        fate = data.draw(st.sampled_from(["has not begun", "in the middle", "done"]))
        if fate == "in the middle":
            copy._words.post(3 + 1 - copy._words[0] % 2, 0)  # as ``write`` begins
        elif fate == "done":
            copy.write(description(last), state(last), last)
    common = common_step(copies)
    assert common == (last if all(last in copy.halves for copy in copies) else last - 1)
    for copy in copies:
        assert copy.description(copy.halves[common]) == description(common)
        copy.return_to(common)
        assert_holds(copy, common)
        copy.write(description(9), state(9), 9)
    assert sorted(copies[0].halves) == [common, 9]
    assert common_step(copies) == 9


def test_copies_of_ranks_of_which_one_has_none_have_no_step() -> None:
    one = filled()
    one.write(description(1), state(1), 1)
    assert common_step([one, filled()]) == -1
    assert common_step([]) == -1


def test_a_larger_copy_has_what_was_current() -> None:
    copy = filled()
    for step in (4, 6):
        copy.write(description(step), state(step), step)
    larger = copy.grown(500, 3 * copy.tensor_bytes)
    assert list(larger.halves) == [6]
    assert_holds(larger, 6)
    tensors = [*state(7), *state(7)]
    assert larger.fits(b"x" * 400, tensors)
    larger.write(b"x" * 400, tensors, 7)
    assert sorted(larger.halves) == [6, 7]
