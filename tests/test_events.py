"""A span is recorded with its times, its step and its bytes, also when what it spans raises."""

from __future__ import annotations

import time

import pytest

from instep.events import Event, Recorder


def test_a_span_lies_between_what_was_before_it_and_what_comes_after():
    recorder = Recorder(rank=3)
    recorder.step = 8
    before = time.monotonic_ns()
    with recorder.span("exchange", lane="communication", num_bytes=12, leaf=2):
        inside = time.monotonic_ns()
    after = time.monotonic_ns()
    (event,) = recorder.events
    assert before <= event.start_ns <= inside <= event.end_ns <= after
    assert event == Event(3, "communication", "exchange", event.start_ns, event.end_ns, 12, 8, 2)


def test_a_span_that_raises_is_recorded_and_raises():
    recorder = Recorder()
    with pytest.raises(LookupError), recorder.span("update", lane="compute"):
        raise LookupError
    assert [event.name for event in recorder.events] == ["update"]


def test_a_span_inside_another_ends_first():
    recorder = Recorder()
    with recorder.span("outer", lane="compute"), recorder.span("inner", lane="data"):
        pass
    inner, outer = recorder.events
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_the_last_events_are_kept():
    recorder = Recorder(capacity=3)
    for name in "abcde":
        with recorder.span(name, lane="host"):
            pass
    assert [event.name for event in recorder.events] == ["c", "d", "e"]


def test_a_duration_is_in_seconds():
    assert Event(0, "host", "save", 1_000_000_000, 3_500_000_000).duration_s == 2.5


def test_seconds_of_a_step_are_summed_by_name():
    recorder = Recorder()
    spans = [(0, "exposed", 1), (1, "exposed", 2), (1, "agree", 4), (1, "exposed", 8), (2, "exposed", 16)]
    for step, name, seconds in spans:
        recorder.events.append(Event(0, "communication", name, 0, seconds * 10**9, step=step))
    assert [recorder.seconds("exposed", step) for step in range(4)] == [1, 10, 16, 0]
    assert recorder.seconds("agree", 1) == 4
    assert recorder.seconds("data", 1) == 0
