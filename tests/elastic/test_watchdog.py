"""What keeps the others from going on: a worker that is stopped, or stays long where it waits for none."""

from __future__ import annotations

import os
from math import inf
from multiprocessing import Pipe
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.heartbeat import BEATING, OWN_WORK, PHASES, WAITING, HeartbeatPage, Position
from instep.elastic.watchdog import CONFIRMED_S, FACTOR, LEAST_S, Reading, find_stuck, limit_s
from instep.elastic.worker_pool import Worker, progress_table
from instep.launch.rank_process import Child

TIMEOUT_S = 60.0
WORKING = [phase for phase in PHASES if phase not in WAITING]
times = st.floats(0, 1000, allow_nan=False)


def at(phase: str, seconds: float, **more: float) -> Reading:
    return Reading(Position(phase, seconds, 3), **more)  # type: ignore[arg-type]


def found(slowest_s: float = 0.5, **readings: Reading) -> dict[int, str]:
    numbered = {int(name[1:]): reading for name, reading in readings.items()}
    return find_stuck(numbered, lambda phase: slowest_s, TIMEOUT_S)


@pytest.mark.parametrize("phase", sorted(WAITING))
def test_a_worker_that_waits_for_others_is_not_the_cause(phase: str) -> None:
    assert found(w0=at(phase, 1e6)) == {}


@pytest.mark.parametrize("phase", sorted(OWN_WORK))
def test_a_worker_that_is_alone_and_reads_a_large_checkpoint_is_let_be(phase: str) -> None:
    assert found(w0=at(phase, 1e6, alone=True)) == {}


@pytest.mark.parametrize("phase", sorted(WAITING - OWN_WORK))
def test_a_worker_that_is_alone_waits_for_nobody_and_has_the_deadline(phase: str) -> None:
    assert found(w0=at(phase, TIMEOUT_S - 0.1, alone=True), w1=at("built", 1e6)) == {}
    assert list(found(w0=at(phase, TIMEOUT_S + 0.1, alone=True), w1=at("built", 1e6))) == [0]


def test_a_worker_that_still_waits_in_a_group_that_is_over_is_once_that_is_long_ago() -> None:
    waits = Position("exchange", 60.0, 3)
    assert list(found(w0=Reading(waits, left_behind_s=5.1))) == [0]
    assert found(w0=Reading(waits, left_behind_s=4.9)) == {}  # it may not have noticed yet


def test_who_waits_in_vain_for_a_group_that_never_was_need_not_wait_for_the_deadline() -> None:
    """Nobody has left that phase yet, so nobody knows how long it takes; but that it is in vain is known."""
    assert list(found(0.0, w0=Reading(Position("join", 5.2, -1), left_behind_s=5.1))) == [0]


def test_a_stopped_worker_is_named_once_that_is_confirmed() -> None:
    assert found(w0=at("exchange", 0.1, stopped_s=CONFIRMED_S - 0.1)) == {}
    assert found(w4=at("exchange", 0.1, stopped_s=CONFIRMED_S + 0.2)) == {4: "was stopped for 1.2 s"}


@given(times, times)
def test_the_limit_is_between_five_seconds_and_the_deadline_of_all_waits(
    slowest_s: float, timeout_s: float
) -> None:
    limit = limit_s(slowest_s, timeout_s)
    assert limit <= timeout_s
    assert limit_s(slowest_s, timeout_s, beats=True) == min(timeout_s, max(LEAST_S, FACTOR * slowest_s))
    if slowest_s:
        assert limit == timeout_s or limit >= max(LEAST_S, FACTOR * slowest_s)
    else:
        assert limit == timeout_s  # nobody knows yet how long it takes


@given(st.sampled_from(WORKING), times, times)
def test_longer_than_the_limit_of_its_own_phase_and_nothing_else_is_stuck(
    phase: str, seconds: float, slowest_s: float
) -> None:
    readings = {0: at("exchange", 1e6), 4: at(phase, seconds)}
    limit = limit_s(slowest_s, TIMEOUT_S, beats=phase in BEATING)
    stuck = {4: f"made no progress in {phase} for {seconds:.1f} s (limit {limit:.1f} s)"}
    assert find_stuck(readings, lambda name: slowest_s if name == phase else 0, TIMEOUT_S) == (
        stuck if seconds > limit else {}
    )


@pytest.mark.parametrize("phase", sorted(BEATING))
def test_a_slow_disk_is_no_hang(phase: str) -> None:
    assert found(0.0, w0=at(phase, 50.0, idle_s=0.3)) == {}  # it reads, or writes
    assert found(0.0, w0=at(phase, 50.0, waits_for_device=True)) == {}  # for one sync of a whole file
    assert list(found(0.0, w0=at(phase, 61.0, waits_for_device=True))) == [0]  # a disk that is gone
    assert list(found(0.0, w0=at(phase, 50.0, idle_s=6.0))) == [0]


def test_one_line_per_worker(page: HeartbeatPage) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        workers = [
            Worker(Child(number, 1, {}, page.file, page.file), pid, number, ours, page, rank=rank)
            for number, pid, rank in [(0, 11, 1), (1, 123456, 0), (7, 13, -1)]
        ]
        readings = {
            0: Reading(Position("exchange", 1.24, 12)),
            1: Reading(Position("forward", 30.06, 12), stopped_s=1.5),
            7: Reading(Position("built", 0.0, -1)),
        }
        text = progress_table(workers, readings)
    assert text.splitlines() == [
        "rank  pid     phase     seconds  steps",
        "1     11      exchange  1.2      12",
        "0     123456  forward   30.1     12     stopped for 1.5 s",
        "-     13      built     0.0      -1",
    ]


def test_a_worker_that_writes_in_a_phase_of_the_disk_is_not_idle(page: HeartbeatPage, tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        worker = Worker(Child(0, 1, {}, page.file, page.file), os.getpid(), 0, ours, page, generation=1)
        page.enter(0, PHASES.index("save"))
        assert worker.read(1, 0.0).idle_s == inf  # nothing to compare with
        (tmp_path / "file").write_bytes(b"x")
        assert worker.read(1, 0.0).idle_s == 0.0
        page.enter(0, PHASES.index("forward"))
        assert worker.read(1, 0.0).idle_s == inf  # who computes and reads may be stuck all the same
