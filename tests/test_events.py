"""A span is recorded with its times, its step and its bytes, in a ring that outlives its writer."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from instep.events import STEP, Event, Recorder, Timeline
from instep.ring_buffer import FIRST, NAMES_BYTES, OTHER, RECORD, RingBuffer, read_head


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def test_a_span_lies_between_what_was_before_it_and_what_comes_after():
    recorder = Recorder(rank=3)
    recorder.step = 8
    before = time.monotonic_ns()
    with recorder.span("exchange", lane="communication", num_bytes=12, leaf=2, bucket=5, peer=1, stage=3):
        inside = time.monotonic_ns()
    after = time.monotonic_ns()
    (event,) = recorder.events
    assert before <= event.start_ns <= inside <= event.end_ns <= after
    assert event == Event(3, "communication", "exchange", event.start_ns, event.end_ns, 12, 8, 2, 5, 1, 3)


def test_a_span_inside_another_ends_first_and_one_that_raises_is_recorded():
    recorder = Recorder()
    with (
        pytest.raises(LookupError),
        recorder.span("outer", lane="compute"),
        recorder.span("inner", lane="data"),
    ):
        raise LookupError
    inner, outer = recorder.events
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_span_inside_one_of_its_name_is_a_part_of_it():
    recorder = Recorder()
    with recorder.span("forward", lane="compute"):
        with recorder.span("forward", lane="compute", leaf=1):
            pass
        with recorder.span("data", lane="data"):
            pass
    assert names(recorder.events) == ["data", "forward"]
    with recorder.span("forward", lane="compute"):
        pass
    assert names(recorder.events) == ["data", "forward", "forward"]


def test_threads_with_a_lane_of_their_own_do_not_hide_each_other_s_spans():
    recorder, both_inside = Recorder(), threading.Barrier(2)

    def compute(r: int) -> None:
        with recorder.as_lane(f"replica {r}"), recorder.span("forward", lane="compute"):
            both_inside.wait(30)

    threads = [threading.Thread(target=compute, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.lane for event in recorder.events) == ["replica 0", "replica 1"]


def test_a_step_reaches_from_its_begin_to_the_begin_of_the_next():
    recorder = Recorder()
    for step in (4, 5):
        recorder.begin_step(step)
        with recorder.span("forward", lane="compute"):
            pass
    recorder.end_step()
    recorder.end_step()
    four, five = (event for event in recorder.events if event.name == STEP)
    assert (four.step, five.step, four.end_ns) == (4, 5, five.start_ns)
    assert names(Timeline(recorder.events).of(0, 4)) == [STEP, "forward"]
    assert names(recorder.last_steps(1)) == ["forward", STEP]
    assert names(recorder.last_steps(2)) == names(recorder.last_steps(9)) == ["forward", STEP] * 2
    assert recorder.step == -1


def test_steps_of_optimizers_are_counted_unless_somebody_else_counts():
    recorder = Recorder()
    for _ in range(2):
        recorder.ensure_step()  # forward begins
        recorder.ensure_step()
        recorder.stepped()
        recorder.stepped()  # a second optimizer
    recorder.end_step()
    assert [event.step for event in recorder.events] == [0, 1, 2]
    driven = Recorder()
    driven.by_optimizer = False
    driven.begin_step(7)
    driven.stepped()
    driven.end_step()
    assert [event.step for event in driven.events] == [7]


def test_the_open_step_has_the_events_that_are_its_own_from_its_begin_on():
    recorder = Recorder(capacity=4)
    for step, name in ((1, "before"), (2, "given up"), (2, "again")):
        recorder.drop_step()
        recorder.begin_step(step)
        recorder.span(name, lane="compute").begin().end()
    late = recorder.span("late", lane="host").begin()
    recorder.step = 1  # another thread ends what was of the step before
    late.end()
    recorder.step = 2
    assert names(recorder.so_far()) == ["again", STEP]
    for i in range(5):
        recorder.span(f"{i}", lane="host").begin().end()
    assert names(recorder.so_far()) == ["1", "2", "3", "4", STEP]


class Device:
    """A device that has done what it was given when ``done`` says so."""

    def __init__(self) -> None:
        self.given: list[tuple[object, int]] = []
        self.done: list[tuple[object, int, int]] = []

    def begin(self) -> int:
        return 100

    def end(self, begun: int, what: object) -> None:
        self.given.append((what, begun))

    def settled(self) -> list[tuple[object, int, int]]:
        found, self.done = self.done, []
        return found


def test_what_a_device_does_is_recorded_when_it_is_done_beside_its_issue():
    recorder = Recorder()
    recorder.marks = device = Device()
    recorder.begin_step(0)
    with recorder.span("forward", lane="compute", leaf=3):
        pass
    with recorder.span("data", lane="data"):
        pass
    ((what, begun),) = device.given
    recorder.begin_step(1)
    device.done.append((what, begun, 500))
    recorder.end_step()
    events = [event for event in recorder.events if event.name == "forward"]
    assert [(event.lane, event.step, event.leaf) for event in events] == [("host", 0, 3), ("compute", 0, 3)]
    assert (events[1].start_ns, events[1].end_ns) == (100, 500)


def test_a_timeline_is_sorted_and_knows_its_ranks_and_steps():
    late, early = Event(1, "compute", "a", 5, 6, step=0), Event(0, "host", STEP, 1, 9, step=0)
    timeline = Timeline([late, early, Event(0, "host", "b", 2, 3), Event(0, "host", STEP, 9, 12, step=1)])
    assert names(timeline.events) == [STEP, "b", "a", STEP]
    assert (timeline.ranks, timeline.steps, early.duration_s) == ([0, 1], [0, 1], 8e-9)
    assert timeline.of(1, 0) == [late] and timeline.of(1, 1) == []
    assert timeline.window(0, 0) == early and timeline.window(1, 0) is None


HEAD = {"boot": "this one", "rank": 3}


def put(ring: RingBuffer, step: int, name: str = "forward") -> None:
    ring.put(name, "compute", 10 * step, 10 * step + 5, step, step, -1, -1, -1)


def steps(ring: RingBuffer) -> list[int]:
    return [record[4] for record in ring.since(0)]


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "ring"


def test_the_records_since_a_number_come_oldest_first_as_far_as_they_are_kept(path):
    ring = RingBuffer(4, path, HEAD)
    for newest in range(1, 12):
        put(ring, newest)
        for count in range(newest + 2):
            kept = [*range(max(count, newest - 4) + 1, newest + 1)]
            assert [(record[0], record[4]) for record in ring.since(count)] == [(x, x) for x in kept]


def test_a_place_that_holds_another_number_is_left_out(path):
    ring = RingBuffer(4, path, HEAD)
    for step in range(6):
        put(ring, step)
    RECORD.pack_into(ring._memory, FIRST + RECORD.size, *[0] * 11)  # that of number 6, the newest
    assert steps(ring) == [2, 3, 4]


@pytest.mark.parametrize("written", [0, 1, 3, 4, 5, 7, 8, 9, 11])
def test_a_file_is_gone_on_with_where_it_ended(tmp_path, written):
    first = RingBuffer(4, tmp_path / "ring", HEAD)
    for step in range(written):
        put(first, step, f"name {step}")
    second = RingBuffer(4, tmp_path / "ring", {**HEAD, "rank": 4})
    assert second.newest == written
    put(second, 99)
    assert steps(second) == [*range(written), 99][-4:]
    names = {second.names[record[8]] for record in second.since(0)}
    assert names == {"forward", *(f"name {step}" for step in range(max(written - 3, 0), written))}
    head, in_file = read_head(tmp_path / "ring")
    assert (head["rank"], in_file) == (4, second.names)


@pytest.mark.parametrize(("capacity", "boot"), [(4, "another"), (4, None), (5, HEAD["boot"])])
def test_another_boot_with_another_clock_and_another_capacity_begin_a_new_ring(tmp_path, capacity, boot):
    put(RingBuffer(4, tmp_path / "ring", HEAD), 1)
    assert steps(RingBuffer(capacity, tmp_path / "ring", {**HEAD, "boot": boot})) == []


def test_a_file_that_is_no_ring_is_replaced(tmp_path):
    (tmp_path / "ring").write_bytes(b"x" * FIRST)
    assert read_head(tmp_path / "ring") is None
    ring = RingBuffer(4, tmp_path / "ring", HEAD)
    assert steps(ring) == []
    assert read_head(tmp_path / "ring") is not None


def test_names_beyond_their_part_of_the_file_are_called_other():
    ring = RingBuffer(2)
    for i in range(NAMES_BYTES // 100):
        put(ring, i, f"{i:098}")
    put(ring, 0, "one too many" * 10)
    assert ring.names[ring.since(ring.newest - 1)[0][8]] == OTHER
    assert ring.names[0] == OTHER


def test_a_full_disk_is_an_error_at_once_and_not_a_signal_later(tmp_path, monkeypatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space left"):
        RingBuffer(2, tmp_path / "ring", HEAD)


def test_threads_lose_no_record(tmp_path: Path) -> None:
    ring = RingBuffer(4000, tmp_path / "ring", HEAD)

    def write(thread: int) -> None:
        for i in range(1000):
            put(ring, 1000 * thread + i, f"thread {thread}")

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps(RingBuffer(4000, tmp_path / "ring", HEAD))) == [*range(4000)]
