"""Snapshots: whole if a writer dies in the middle, there after it, cheap enough, held by the supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.elastic.snapshot import (
    Snapshot,
    SnapshotHandle,
    SnapshotInterval,
    SnapshotStore,
    common_step,
)
from instep.launch.memory_file import MemoryFile
from instep.state.stored import offsets

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


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    return offsets(x.nbytes for x in tensors)[-1]


def description(number: int) -> bytes:
    return f"state {number}".encode() * (1 + number % 3)


def filled(*numbers: int) -> Snapshot:
    snapshot = Snapshot.create(100, tensor_bytes(state(0)))
    for number in numbers:
        snapshot.write(description(number), state(number))
    return snapshot


def assert_holds(snapshot: Snapshot, number: int) -> None:
    """Description and tensors are those of one and the same write."""
    assert snapshot.description() == description(number)
    found = snapshot.tensors(state(-1))
    for one, expected in zip(found, state(number), strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


def test_a_rank_that_owns_nothing_has_a_copy_all_the_same() -> None:
    snapshot = Snapshot.create(100, 0)
    snapshot.write(b"of step 3", [], 3)
    assert snapshot.tensors([]) == []
    assert (snapshot.description(), list(snapshot.halves)) == (b"of step 3", [3])


def test_live_tensors_of_any_layout_are_copied_without_autograd() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    turned = torch.arange(6.0).view(2, 3).t()
    snapshot = Snapshot.create(8, tensor_bytes([weight, turned]))
    snapshot.write(b"", [weight, turned])
    with torch.no_grad():
        weight.zero_()
    found = snapshot.tensors([weight, turned])
    assert found[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(found[1], turned)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(0, 500))
@settings(max_examples=50)
def test_what_fits_touches_neither_the_other_half_nor_what_lies_behind(sizes: list[int], length: int) -> None:
    tensors = [torch.full((size,), i + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]
    snapshot = Snapshot.create(length, tensor_bytes(tensors))
    first, second = b"a" * length, b"b" * length
    size = tensor_bytes(tensors)
    assert snapshot.fits(length, size)
    assert not snapshot.fits(length, tensor_bytes([*tensors, torch.zeros(65)]))
    assert not snapshot.fits(length + 128, size)
    snapshot.write(first, tensors)
    snapshot.write(second, [x + 100 for x in tensors])
    snapshot._words.post(0, snapshot._words[0] - 1)  # the other half, as it was
    assert snapshot.description() == first
    assert all(map(torch.equal, snapshot.tensors(tensors), tensors))


class Died(Exception):
    """Instead of a process."""


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("copied", range(len(SHAPES) + 1))
def test_a_write_that_ends_in_the_middle_leaves_the_old_one_whole(
    written: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumerated: after none, one, ... all of the tensors."""
    snapshot = filled()
    for step in range(written):
        snapshot.write(description(step), state(step), step)

    def die_after(into: list[Tensor], tensors: list[Tensor]) -> None:
        for x, y in list(zip(into, tensors, strict=True))[:copied]:
            x.copy_(y)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", die_after)
        with pytest.raises(Died):
            snapshot.write(description(50), state(50), 50)
    assert_holds(snapshot, written - 1)
    assert list(snapshot.halves) == [written - 1]
    snapshot.write(description(51), state(51), 51)
    assert_holds(snapshot, 51)


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
    snapshot = filled(4)
    connection.send([os.getpid(), snapshot.mapping.fd, snapshot.mapping.inode])
    reduction.send_handle(connection, snapshot.mapping.fd, None)
    connection.recv()


def test_it_is_there_after_its_writer_and_gone_after_the_last_who_holds_it() -> None:
    with process(write_and_wait) as connection:
        theirs = MemoryFile(*connection.recv())
        ours = MemoryFile(os.getpid(), reduction.recv_handle(connection), theirs.inode)
    with pytest.raises(OSError, match=r"."):
        Snapshot.attach(theirs)
    assert_holds(Snapshot.attach(ours), 4)
    os.close(ours.fd)
    with pytest.raises(OSError, match=r"."):
        Snapshot.attach(ours)


def place_of(snapshot: Snapshot) -> MemoryFile:
    return MemoryFile(os.getpid(), snapshot.mapping.fd, snapshot.mapping.inode)


def test_other_memory_behind_the_same_number_is_refused() -> None:
    place = place_of(snapshot := filled(1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not the memory that it was"):
        Snapshot.attach(replace(place, inode=place.inode + 1))
    assert len(os.listdir("/proc/self/fd")) == before
    assert_holds(snapshot, 1)


def test_it_has_no_name_and_goes_with_the_last_who_looks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    snapshot = filled(1)
    assert "memfd:instep" in os.readlink(f"/proc/self/fd/{snapshot.mapping.fd}")
    del snapshot
    assert len(os.listdir("/proc/self/fd")) == before


def killed_while_copying(connection: Connection, place: MemoryFile, before: int) -> None:
    """Write state after state, and be killed in the copying of the ``before``-th, half-way."""
    snapshot = Snapshot.attach(place)
    original = torch._foreach_copy_

    def deadly(into: list[Tensor], tensors: list[Tensor]) -> None:
        if int(tensors[0]) == before:
            original(into[:3], tensors[:3])
            os.kill(os.getpid(), signal.SIGKILL)
        original(into, tensors)

    torch._foreach_copy_ = deadly
    for number in range(1, 10):
        snapshot.write(description(number), state(number))


def test_a_process_that_is_killed_in_a_write_leaves_the_old_one() -> None:
    snapshot, before = filled(0), 2
    with process(killed_while_copying, place_of(snapshot), before) as connection, pytest.raises(EOFError):
        connection.recv()  # until it is gone
    assert_holds(snapshot, before - 1)
    snapshot.write(description(77), state(77))
    assert_holds(snapshot, 77)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def written_steps(
    interval: SnapshotInterval, clock: list[float], costs: Callable[[int], float], steps: int
) -> list[int]:
    """The steps after which a snapshot is written, if a step takes 0.1 s."""
    made = []
    for step in range(1, steps + 1):
        if interval.due(step):
            with interval.copying(step, 0.1):
                clock[0] += costs(len(made))
            made.append(step)
    return made


@given(st.floats(1e-4, 2.0), st.floats(0.005, 0.5))
@settings(max_examples=50)
def test_snapshots_take_no_more_than_their_share_of_the_time(cost_s: float, share: float) -> None:
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "thread_time", lambda: clock[0])
        steps = 2000
        made = written_steps(SnapshotInterval(share), clock, lambda number: cost_s, steps)
    assert made[:2] == [1, 2]  # the first one does not count, the second one tells
    assert (len(made) - 2) * cost_s <= share * 0.1 * steps * 1.001
    gaps = {b - a for a, b in pairwise(made[1:])}
    assert len(gaps) <= 1
    # No sparser than need be: one step less would be over the share.
    assert all(gap == 1 or cost_s > share * 0.1 * (gap - 1) * 0.999 for gap in gaps)


def test_one_slow_copy_is_followed_by_a_pause_and_forgotten(clock: list[float]) -> None:
    costs = {1: 0.0199, 2: 0.0019}
    assert written_steps(SnapshotInterval(0.02), clock, lambda number: costs.get(number, 0.0199), 15) == [
        1,
        2,
        12,
        13,
        14,
        15,
    ]


def test_a_copy_that_the_machine_interrupted_is_not_a_slow_one() -> None:
    interval, elsewhere = SnapshotInterval(0.02), threading.Event()
    for step in (1, 2):
        with interval.copying(step, 0.1):
            elsewhere.wait(0.05)  # 25 steps' share, in which this thread does not run
        assert interval.due(step + 1)


@given(st.data())
@settings(max_examples=60)
def test_wherever_ranks_are_killed_they_leave_a_step_that_all_have(data: st.DataObject) -> None:
    """No rank begins a snapshot before all have ended the one before; no more is known of their speeds."""
    num_ranks, last = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    snapshots = [filled() for _ in range(num_ranks)]
    for step in range(1, last):
        for snapshot in snapshots:
            snapshot.write(description(step), state(step), step)
    for snapshot in snapshots:
        fate = data.draw(st.sampled_from(["has not begun", "in the middle", "done"]))
        if fate == "in the middle":
            snapshot._words.post(3 + 1 - snapshot._words[0] % 2, 0)  # as ``write`` begins
        elif fate == "done":
            snapshot.write(description(last), state(last), last)
    common = common_step(snapshots)
    assert common == (last if all(last in snapshot.halves for snapshot in snapshots) else last - 1)
    for snapshot in snapshots:
        assert snapshot.description(snapshot.halves[common]) == description(common)
        snapshot.return_to(common)
        assert_holds(snapshot, common)
        snapshot.write(description(9), state(9), 9)
    assert sorted(snapshots[0].halves) == [common, 9]
    assert common_step(snapshots) == 9


def test_copies_of_ranks_of_which_one_has_none_have_no_step() -> None:
    one = filled()
    one.write(description(1), state(1), 1)
    assert common_step([one, filled()]) == -1
    assert common_step([]) == -1


def test_a_larger_copy_has_what_was_current() -> None:
    snapshot = filled()
    for step in (4, 6):
        snapshot.write(description(step), state(step), step)
    larger = snapshot.grown(500, 3 * snapshot.tensor_bytes)
    assert list(larger.halves) == [6]
    assert_holds(larger, 6)
    tensors = [*state(7), *state(7)]
    assert larger.fits(400, tensor_bytes(tensors))
    larger.write(b"x" * 400, tensors, 7)
    assert sorted(larger.halves) == [6, 7]


@pytest.fixture
def store() -> Iterator[SnapshotStore]:
    made = SnapshotStore()
    yield made
    made.clear()


def handle(generation: int, rank: int, num_ranks: int) -> SnapshotHandle:
    """With a descriptor of its own."""
    return SnapshotHandle(
        MemoryFile(os.getpid(), os.open(os.devnull, os.O_RDONLY), 1), generation, rank, num_ranks
    )


def is_open(handle: SnapshotHandle) -> bool:
    return Path(f"/proc/self/fd/{handle.place.fd}").exists()


def test_a_set_stays_until_the_next_one_is_complete(store: SnapshotStore) -> None:
    old = [handle(1, rank, 3) for rank in (2, 0, 1)]
    for each in old:
        store.add(each)
    first, second = handle(2, 0, 2), handle(2, 1, 2)
    store.add(first)
    assert store.handles == (old[1], old[2], old[0], first)
    store.add(second)
    assert store.handles == (first, second)
    assert not any(map(is_open, old))
    assert is_open(first)


def test_a_generation_that_ended_before_all_had_written_leaves_the_set_before_it(
    store: SnapshotStore,
) -> None:
    whole, half, other = handle(1, 0, 1), handle(2, 0, 2), handle(3, 1, 2)
    for each in (whole, half, other):
        store.add(each)
    assert store.handles == (whole, half, other)
    store.add(last := handle(3, 0, 2))
    assert store.handles == (last, other)
    assert not is_open(half)


def test_a_larger_snapshot_replaces_that_of_its_rank(store: SnapshotStore) -> None:
    a, b, larger = handle(1, 0, 2), handle(1, 1, 2), handle(1, 0, 2)
    for each in (a, b, larger):
        store.add(each)
    assert store.handles == (larger, b)
    assert not is_open(a)


def test_what_comes_too_late_is_let_go(store: SnapshotStore) -> None:
    whole, late = handle(3, 0, 1), handle(2, 1, 2)
    store.add(whole)
    store.add(late)
    assert store.handles == (whole,)
    assert not is_open(late)
