"""A span is recorded with its times, its step and its bytes, also when what it spans raises."""

from __future__ import annotations

import threading
import time

import pytest

from instep.events import STEP, Event, Recorder, Timeline


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


def test_what_is_cancelled_leaves_nothing_and_the_next_one_is_recorded():
    recorder = Recorder()
    recorder.span("update", lane="compute").begin().cancel()
    recorder.span("update", lane="compute").begin().end()
    assert names(recorder.events) == ["update"]


def test_the_last_events_are_kept():
    recorder = Recorder(capacity=3)
    for name in "abcde":
        with recorder.span(name, lane="host"):
            pass
    assert names(recorder.events) == ["c", "d", "e"]


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


def test_several_things_that_have_ended_are_recorded_at_once():
    recorder = Recorder(rank=2)
    recorder.step = 4
    with recorder.as_lane("replica 1"):
        recorder.put_all([("queued", 1, 2, 0, -1)], lane="communication", bucket=3)
    recorder.put_all([("wait", 2, 5, 0, 0), ("exchange", 5, 6, 80, -1)], lane="communication", bucket=7)
    fields = [
        (x.lane, x.name, x.start_ns, x.end_ns, x.bytes, x.step, x.bucket, x.peer) for x in recorder.events
    ]
    assert fields == [
        ("replica 1", "queued", 1, 2, 0, 4, 3, -1),
        ("communication", "wait", 2, 5, 0, 4, 7, 0),
        ("communication", "exchange", 5, 6, 80, 4, 7, -1),
    ]


def test_who_watches_is_told_of_the_spans_that_it_names():
    recorder, told = Recorder(), []
    recorder.watch, recorder.watched = lambda name, begins: told.append((name, begins)), {"forward"}
    with recorder.span("forward", lane="compute"), recorder.span("data", lane="data"):
        pass
    recorder.span("forward", lane="compute").begin().cancel()
    assert told == [("forward", True), ("forward", False)] * 2


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


def test_two_lanes_of_exchanges_record_the_same_name_at_once():
    recorder = Recorder()
    with recorder.span("exchange", lane="communication", bucket=0):
        recorder.span("exchange", lane="communication", bucket=1).begin().end()
    assert sorted(event.bucket for event in recorder.events) == [0, 1]


def test_the_open_step_is_told_as_if_it_ended_now_with_what_the_device_has_done():
    recorder = Recorder()
    assert recorder.so_far() == []
    recorder.marks = device = Device()
    recorder.begin_step(3)
    recorder.span("forward", lane="compute").begin().end()
    ((what, begun),) = device.given
    device.done.append((what, begun, 700))
    issued, done, step = recorder.so_far()
    assert (issued.lane, done.lane, done.end_ns) == ("host", "compute", 700)
    assert (step.name, step.step) == (STEP, 3) and step.end_ns >= issued.end_ns
    assert STEP not in names(recorder.events)


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


def test_a_step_goes_on_in_another_ring_with_what_is_recorded_there(tmp_path):
    for step in (3, 3):
        recorder = Recorder()
        recorder.begin_step(step)
        recorder.span("in memory", lane="host").begin().end()
        recorder.keep_in(tmp_path / "ring", 8, {"boot": "this"})  # which has those of the first time
        recorder.span("in the file", lane="host").begin().end()
        assert names(recorder.so_far()) == ["in the file", STEP]
    recorder.keep_in_memory()
    assert names(recorder.so_far()) == [STEP]


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


def test_what_belongs_to_no_stage_says_so_and_what_a_device_does_for_one_keeps_it():
    recorder = Recorder()
    recorder.marks = device = Device()
    recorder.begin_step(0)
    with recorder.span("forward", lane="compute", leaf=3, stage=0):
        pass
    recorder.put("update", 1, 2, lane="host")
    ((what, begun),) = device.given
    device.done.append((what, begun, 500))
    told = [(event.lane, event.name, event.stage) for event in recorder.so_far()]
    assert told == [
        ("host", "forward", 0),
        ("host", "update", -1),
        ("compute", "forward", 0),
        ("host", STEP, -1),
    ]
    assert [event.stage for event in recorder.events] == [0, -1, 0]


def test_a_timeline_is_sorted_and_knows_its_ranks_and_steps():
    late, early = Event(1, "compute", "a", 5, 6, step=0), Event(0, "host", STEP, 1, 9, step=0)
    timeline = Timeline([late, early, Event(0, "host", "b", 2, 3), Event(0, "host", STEP, 9, 12, step=1)])
    assert names(timeline.events) == [STEP, "b", "a", STEP]
    assert (timeline.ranks, timeline.steps, early.duration_s) == ([0, 1], [0, 1], 8e-9)
    assert timeline.of(1, 0) == [late] and timeline.of(1, 1) == []
    assert timeline.window(0, 0) == early and timeline.window(1, 0) is None
