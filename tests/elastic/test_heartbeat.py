"""The heartbeat page: what one process writes others read; the heartbeat is that of the main thread alone."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.heartbeat import MAX_FAULTS, MAX_WORKERS, PHASES, Heartbeat, HeartbeatPage
from instep.launch.memory_file import MemoryFile


@given(st.lists(st.integers(0, MAX_FAULTS - 1), max_size=30))
def test_each_fault_fires_once_whoever_asks(numbers: list[int]) -> None:
    page = HeartbeatPage.create()
    with closing(page.file):
        pages = [page, HeartbeatPage(page.file)]
        fired = [n for i, n in enumerate(numbers) if pages[i % 2].fire(n)]
    assert fired == list(dict.fromkeys(numbers))


def test_the_time_of_the_last_fault_is_when_it_strikes(page: HeartbeatPage) -> None:
    assert page.fired_ns == 0
    began = time.monotonic_ns()
    page.fire(5)
    assert began <= page.fired_ns <= time.monotonic_ns()
    page.fire(0, after_ms=1e6)
    assert page.fired_ns >= began + 10**12


def test_the_slowest_visit_to_a_phase_is_remembered_for_all_workers(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0, 0, 4, 10, 11, 31]).__next__
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() * 10**9)
    page.reset(0)
    page.reset(MAX_WORKERS - 1)
    forward, backward = PHASES.index("forward"), PHASES.index("backward")
    page.enter(0, forward)  # at 4
    page.enter(0, backward)  # at 10
    page.enter(MAX_WORKERS - 1, forward)  # at 11
    page.enter(MAX_WORKERS - 1, backward)  # at 31
    assert page.slowest_s("forward") == 20
    assert page.slowest_s("start") == 11
    assert page.slowest_s("backward") == 0  # nobody has left it


def test_a_beat_ends_a_silence_and_no_phase(page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 1, 5, 12, 13, 15, 99]).__next__
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() * 10**9)
    heartbeat, heard = Heartbeat(page, 3), []
    heartbeat.on_enter = lambda phase, step: heard.append(phase)
    page.reset(3)
    heartbeat.enter("hash")  # at 1
    heartbeat.beat()  # at 5
    heartbeat.beat()  # at 12
    assert page.position(3).seconds == 1
    heartbeat.enter("ledger")  # at 15
    assert page.slowest_s("hash") == 7
    for act, told in ((heartbeat.beat, ()), (heartbeat.enter, ("save",))):  # of another thread they are none
        thread = threading.Thread(target=act, args=told)
        thread.start()
        thread.join()
    assert page.position(3).seconds == 99 - 15
    assert heard == ["hash", "ledger"]


def test_a_new_process_in_an_old_slot_has_not_begun(page: HeartbeatPage) -> None:
    page.enter(9, PHASES.index("update"))
    page.set_step(9, 4)
    page.reset(9)
    position = page.position(9)
    assert (position.phase, position.step) == ("start", -1)
    assert 0 <= position.seconds < 60


def test_neighbours_do_not_touch_each_other(page: HeartbeatPage) -> None:
    for worker in range(MAX_WORKERS):
        page.enter(worker, worker % len(PHASES))
        page.set_step(worker, 1000 + worker)
    for number in range(MAX_FAULTS):
        page.fire(number)
    other = HeartbeatPage(page.file)
    for worker in range(MAX_WORKERS):
        position = other.position(worker)
        assert (position.phase, position.step) == (PHASES[worker % len(PHASES)], 1000 + worker)
    assert (other.stop, other.regroup, other.over) == (False, 0, 0)
    page.stop, page.regroup, page.over = True, 7, 6
    assert (other.stop, other.regroup, other.over) == (True, 7, 6)


def leave_a_trace(file: MemoryFile) -> None:
    page = HeartbeatPage(file)
    page.enter(1, PHASES.index("save"))
    page.set_step(1, 5)


def test_another_process_leaves_its_trace(page: HeartbeatPage) -> None:
    process = get_context("fork").Process(target=leave_a_trace, args=(page.file,))
    process.start()
    process.join()
    assert (page.position(1).phase, page.position(1).step) == ("save", 5)


def test_whoever_listens_is_told_the_phase_and_the_steps_that_are_done() -> None:
    heartbeat, heard = Heartbeat(), []
    heartbeat.on_enter = lambda phase, step: heard.append((phase, step))
    heartbeat.enter("start")
    heartbeat.set_step(3)
    heartbeat.enter("forward")
    assert heard == [("start", -1), ("forward", 3)]


def test_the_page_is_written_before_anybody_is_told(page: HeartbeatPage) -> None:
    """Who is told may die of it, and the page must say where."""
    heartbeat, seen = Heartbeat(page, 0), []
    heartbeat.on_enter = lambda phase, step: seen.append(page.position(0).phase)
    heartbeat.enter("exchange")
    assert seen == ["exchange"]
