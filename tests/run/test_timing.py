"""Where the time of a rank's steps goes, while it trains, and what the ranks tell each other of it."""

from __future__ import annotations

import pytest

from instep.events import GRADIENT_SYNC, PARAMETER_GATHER, STEP, Recorder
from instep.run.timing import LOOKED_AT, NUM_OWN, Timing
from instep.timeline.breakdown import parts
from instep.timeline.straggler import OwnTimes


class Played:
    """A clock that stands still unless it is told to go on, and a recorder by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1000
        monkeypatch.setattr("instep.events.time.monotonic_ns", lambda: self.now_ms * 1_000_000)
        self.recorder = Recorder(rank=1)

    def span(self, name: str, ms: int, lane: str = "host", **more: int) -> None:
        with self.recorder.span(name, lane=lane, **more):
            self.now_ms += ms

    def step(self, compute_ms: int = 30) -> None:
        """One micro-batch, after which the gradients travel for 5 ms."""
        self.span("data", 2, "data")
        self.span("forward", compute_ms // 3, "compute")
        self.span("backward", compute_ms - compute_ms // 3, "compute")
        self.span(GRADIENT_SYNC, 5)
        self.span("update", 3, "compute")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_a_ranks_own_figures_are_those_of_the_step_before_with_all_that_followed_it(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=2)
    timing.begin(0)
    assert timing.own == [0.0] * NUM_OWN
    played.step(compute_ms=30)
    timing.waits()
    played.span("ledger", 4)
    assert timing.own == [0.0] * NUM_OWN
    timing.begin(1)
    own = OwnTimes.from_list(timing.own)
    assert (own.rank, own.step, own.micro_batches) == (1, 0, 1)
    assert [own.compute, own.data, own.host, own.wall] == pytest.approx([0.030, 0.002, 0.004, 0.044])
    played.step(compute_ms=60)
    timing.waits()
    assert OwnTimes.from_list(timing.own) == own
    timing.begin(2)
    assert OwnTimes.from_list(timing.own).compute == pytest.approx(0.060)


def test_the_runs_own_work_is_no_host_code_of_the_script(played: Played) -> None:
    """Rank 0 writes the record and the snapshot: it is not slow by that."""
    timing = Timing(played.recorder, num_ranks=2)
    timing.begin(0)
    played.step()
    with timing.bookkeeping("snapshot"):
        played.now_ms += 30
    timing.waits()
    with timing.bookkeeping("ledger"):
        played.now_ms += 20
    played.span("print", 4)
    timing.begin(1)
    live = OwnTimes.from_list(timing.own)
    assert live.host == pytest.approx(0.004)
    assert live.wall == pytest.approx(0.094)
    timing.end()
    traced = parts([event for event in played.recorder.events if event.step == 0])
    assert traced is not None
    assert OwnTimes.of(traced).host == pytest.approx(0.004)


def test_no_time_between_two_steps_is_in_neither(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    for step in range(3):
        timing.begin(step)
        played.step()
        played.now_ms += 7  # of no span
    timing.end()
    ends = [event for event in played.recorder.events if event.name == STEP]
    assert [(e.start_ns, e.end_ns) for e in ends] == [
        (s * 10**6, (s + 47) * 10**6) for s in (1000, 1047, 1094)
    ]
    found = timing.breakdown()
    assert found.parts["unattributed"] == pytest.approx(0.007) and found.steps == 3


def test_an_optimizers_step_does_not_end_a_step_that_is_begun_by_name(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    timing.begin(5)
    played.recorder.stepped()
    played.step()
    timing.end()
    assert [event.step for event in played.recorder.events if event.name == STEP] == [5]


def test_waits_are_those_of_the_open_step_so_far(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=2)
    assert timing.waits() == (0, 0, 0)
    timing.begin(0)
    played.step()
    assert timing.waits() == pytest.approx((0.005, 0, 0))
    played.span("parameter update", 11, peer=0)
    assert timing.waits() == pytest.approx((0.005, 0.011, 0))
    timing.begin(1)
    assert timing.waits() == (0, 0, 0)


def test_the_breakdown_is_of_all_steps_and_of_no_step_it_is_empty(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    assert (timing.breakdown().steps, timing.breakdown().rank, timing.breakdown().wall_s) == (0, 1, 0)
    timing.end()
    assert timing.breakdown().steps == 0 and timing.slow() is None and timing.own == [0.0] * NUM_OWN
    for step in range(4):
        timing.begin(step)
        played.step(compute_ms=30 + 10 * step)
    timing.end()
    found = timing.breakdown()
    assert found.steps == 4 and found.wall_s == pytest.approx(0.055)
    assert found.parts["compute"] == pytest.approx(0.045) and found.causes == {
        GRADIENT_SYNC: pytest.approx(0.005)
    }


def test_the_breakdown_leaves_out_what_this_part_of_the_run_has_not_made(played: Played) -> None:
    """An earlier part made steps up to 6 with gathers; this one goes on after step 3, up to 5."""

    def make(steps: range, compute_ms: int, gathers: int) -> None:
        timing = Timing(played.recorder, num_ranks=1)
        for step in steps:
            timing.begin(step)
            played.span(PARAMETER_GATHER, gathers, "communication")
            played.step(compute_ms)
        timing.end()

    make(range(7), compute_ms=300, gathers=20)
    played.recorder.begin_step(7)
    played.span("forward", 500, "compute")  # and was killed in the middle of one
    played.recorder.drop_step()
    make(range(3, 6), compute_ms=60, gathers=0)
    found = Timing(played.recorder, num_ranks=1).breakdown(since=3)
    assert (found.steps, found.gathers_s) == (3, 0)
    assert found.wall_s == found.median_s == pytest.approx(0.070)
    assert found.parts["compute"] == pytest.approx(0.060)


def test_of_steps_that_are_made_again_the_last_time_counts(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    for steps, compute_ms in ((range(4), 30), (range(2, 4), 300)):
        for step in steps:
            timing.begin(step)
            played.step(compute_ms)
        timing.end()
    found = timing.breakdown()
    assert found.steps == 4 and found.parts["compute"] == pytest.approx((2 * 0.030 + 2 * 0.300) / 4)


def test_the_slow_rank_is_found_from_what_was_heard_and_ranks_without_a_step_count_for_nothing() -> None:
    timing = Timing(Recorder(), num_ranks=3)
    timing.heard([[0.0] * NUM_OWN] * 3)
    assert timing.slow() is None

    def own(rank: int, step: int, compute: float) -> list[float]:
        return OwnTimes(rank, step, 1, compute, 0.001, 0.002, 0.1).to_list()

    for step in range(8):
        timing.heard([own(0, step, 0.05), own(1, step, 0.05), own(2, step, 0.08)])
    slow = timing.slow()
    assert slow is not None and (slow.rank, slow.phase, slow.since) == (2, "its own compute", 0)
    for step in range(8, 8 + LOOKED_AT):
        timing.heard([own(0, step, 0.05), own(1, step, 0.05), own(2, step, 0.05)])
    assert timing.slow() is None
