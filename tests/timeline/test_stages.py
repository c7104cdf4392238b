"""What steps of a pipeline tell: the bubble by its phases, beside its closed form, and a slow stage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from instep.events import Event, Timeline
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, bubble_rate, simulate
from instep.ring_buffer import RingBuffer
from instep.timeline.analysis import Analysis, analyse, summary_lines
from instep.timeline.breakdown import parts
from instep.timeline.run_setting import RunSetting
from instep.timeline.stages import pipeline_figures
from instep.timeline.straggler import OwnTimes, find_slow_rank
from instep.timeline.trace_files import read_traces
from tests.timeline.made_up_run import name

EVEN = StageTimes(1, 1, 1)
SLOW = StageTimes([0.01, 0.03], [0.01, 0.03], [0.01, 0.03])  # the second stage takes three times as long


def steps(schedule: str, num_micro_batches: int, times: StageTimes, count: int) -> list[Timeline]:
    """The same step again and again, one after the other, on two ranks."""
    found = []
    for step in range(count):
        events = simulate(generate(schedule, 2, num_micro_batches), times, step=step).events
        length = max(event.end_ns for event in events)
        found.append(Timeline(moved(event, step * length) for event in events))
    return found


def moved(event: Event, by_ns: int) -> Event:
    return event._replace(start_ns=event.start_ns + by_ns, end_ns=event.end_ns + by_ns)


def read(folder: Path, timelines: list[Timeline], schedule: str, cuts: Any = "") -> Analysis:
    """What ``analyse`` finds in the files of a run that has recorded ``timelines``."""
    setting = RunSetting("bucketed", "shm", 2, 2, 1, 1, 2, 25.0, 8, 4, pp=2, schedule=schedule, cuts=cuts)
    for rank in range(2):
        head = {"boot": "here", "host": "here", "world_size": 2, "rank": rank, "setting": asdict(setting)}
        ring = RingBuffer(4096, folder / name(rank), head)
        for step, timeline in enumerate(timelines):
            for e in sorted(timeline.of(rank, step), key=lambda event: event.end_ns):
                ring.put(
                    e.name, e.lane, e.start_ns, e.end_ns, e.bytes, e.step, e.leaf, e.bucket, e.peer, e.stage
                )
    return analyse(read_traces(folder))


def test_a_ranks_time_is_fill_computation_and_waits_in_between_and_drain():
    """1f1b, 2 ranks, 2 micro-batches, forward 1, backward 2, a message 0.5: as drawn for the simulator."""
    figures = pipeline_figures([simulate(generate("1f1b", 2, 2), StageTimes(1, 1, 1, 0.5))], "1f1b")
    assert figures is not None
    told = [(row.fill_s, row.computes_s, row.steady_s, row.drain_s) for row in figures.ranks]
    assert told == [(0, 6, 4, 0), (1.5, 6, 0, 2.5)]
    assert (figures.span_s, figures.bubble, figures.formula) == (10, 0.4, pytest.approx(1 / 3))
    assert [(x.stage, x.ranks, x.forward_s, x.backward_s) for x in figures.stages] == [
        (0, (0,), 1, 2), (1, (1,), 1, 2),
    ]  # fmt: skip
    assert figures.slow is None


def test_ranks_that_share_each_stage_are_as_many_pipelines():
    """Ranks 0 and 1 share the first stage, along tp or ep: as one pipeline they had half a stage each."""
    one = simulate(generate("1f1b", 2, 2), StageTimes(1, 1, 1, 0.5))
    shared = Timeline(e._replace(rank=2 * e.rank + k) for e in one.events for k in range(2))
    alone, figures = pipeline_figures([one], "1f1b"), pipeline_figures([shared], "1f1b")
    assert alone is not None and figures is not None
    assert (figures.num_ranks, figures.chunks, figures.bubble) == (2, 1, alone.bubble)
    assert [x.ranks for x in figures.stages] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_equal_stages_without_messages_wait_as_the_closed_form_says(schedule):
    timeline = simulate(generate(schedule, 4, 8), EVEN)
    figures = pipeline_figures([timeline], schedule)
    assert figures is not None
    assert figures.bubble == pytest.approx(bubble_rate(timeline))
    assert figures.bubble == pytest.approx(figures.formula)
    assert (figures.num_ranks, figures.micro_batches, figures.slow) == (4, 8, None)
    assert figures.chunks == (2 if schedule in ("interleaved", "zb-v") else 1)
    for row in figures.ranks:
        assert row.fill_s + row.computes_s + row.steady_s + row.drain_s == pytest.approx(figures.span_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_that_takes_three_times_as_long_is_named_with_what_the_bubble_becomes(schedule):
    figures = pipeline_figures(steps(schedule, 8, SLOW, 3), schedule)
    assert figures is not None and figures.slow is not None
    slow = figures.slow
    assert (slow.stage, slow.ranks, slow.times) == (1, (1,), pytest.approx(3))
    assert (slow.forward_s, slow.others_forward_s) == pytest.approx((0.03, 0.01))
    assert (slow.backward_s, slow.others_backward_s) == pytest.approx((0.06, 0.02))
    assert slow.bubble == pytest.approx(figures.bubble)
    even = simulate(generate(schedule, 2, 8), StageTimes(0.02, 0.02, 0.02))
    assert slow.even_bubble == pytest.approx(bubble_rate(even))
    assert slow.gain_s > 0.2


@pytest.mark.parametrize("second", [0.9, 1.0, 1.2])
def test_stages_that_hardly_differ_are_not_named(second):
    figures = pipeline_figures(steps("1f1b", 8, StageTimes([1, second], [1, second], [1, second]), 3))
    assert figures is not None
    assert (figures.slow, figures.formula) == (None, None)  # the schedule has no name here


def test_several_pipelines_are_told_apart_by_their_micro_batches():
    one = simulate(generate("1f1b", 2, 4), SLOW).events
    other = [e._replace(rank=e.rank + 2, leaf=e.leaf + 4 if e.leaf >= 0 else -1) for e in one]
    figures = pipeline_figures([Timeline([*one, *other])], "1f1b")
    assert figures is not None and figures.slow is not None
    assert (figures.num_ranks, figures.micro_batches, figures.slow.ranks) == (2, 4, (1, 3))
    assert [row.rank for row in figures.ranks] == [0, 1, 2, 3]
    assert figures.ranks[1].steady_s == figures.ranks[3].steady_s


def test_waits_for_other_stages_are_the_bubble_and_no_slower_rank():
    timelines = steps("1f1b", 8, SLOW, 6)
    rows = []
    for step, timeline in enumerate(timelines):
        for rank in (0, 1):
            found = parts(timeline.of(rank, step))
            assert found is not None
            assert (found.waiting, found.exposed, found.micro_batches) == ({}, {}, 8)
            assert found.compute + found.bubble_s == pytest.approx(found.wall)
            assert found.stage == rank
            rows.append(OwnTimes.from_list(OwnTimes.of(found).to_list()))
    assert find_slow_rank(rows) is None  # of these ranks, the second does what is another one's to do


def test_the_lines_say_the_bubble_its_formula_and_the_slow_stage(tmp_path):
    """A forward of 10 ms, eight micro-batches of 90 ms on the second rank, a backward of 20 ms."""
    found = read(tmp_path, steps("1f1b", 8, SLOW, 8), "1f1b")
    lines = [
        f"{label:<7}{text}"
        for label, text in summary_lines(found.breakdowns, found.slow, found.advice, found.pipeline)
    ]
    assert lines[:5] == [
        "time   750 ms a step on average over 6 = compute 480 ms (64.0%) + pipeline bubble 270 ms (36.0%)",
        "bubble 36.0% of the 750 ms from the first forward to the last backward: fill 5.0 ms + steady state "
        "255 ms + drain 10 ms on average over 2 ranks; with equal stages 1f1b has (p-1)/(m+p-1) = 11.1%, "
        "p = 2 ranks, m = 8 micro-batches",
        "       stage 0 (rank 0): fill 0.0 ms + steady state 510 ms + drain 0.0 ms; per micro-batch forward "
        "10 ms, backward 20 ms",
        "       stage 1 (rank 1): fill 10 ms + steady state 0.0 ms + drain 20 ms; per micro-batch forward "
        "30 ms, backward 60 ms",
        "slow   stage 1 (rank 1) takes 3.0 times as long per micro-batch as the others: forward 30 ms, "
        "theirs 10 ms; backward 60 ms, theirs 20 ms. Simulated, the bubble is 36.0%, and 11.1% with "
        "equal stages: move layers to another stage",
    ]
    (advice,) = found.advice
    assert advice.cause == "slow stage" and advice.text.startswith("Stage 1 takes 3.0 times as long")
    assert advice.gain_ms == pytest.approx(210)  # of 750 ms: nine of 60 ms are left
    assert advice.try_ == "--parallel.cuts cost"
    assert found.slow is None
    assert found.figures()["pipeline"]["slow"]["stage"] == 1


@pytest.mark.parametrize(("cuts", "flag"), [("layers", "--parallel.cuts cost"), ("cost", ""), ([2], "cost")])
def test_a_slow_stage_of_a_pipeline_that_is_cut_by_cost_has_no_flag_to_try(tmp_path, cuts, flag):
    """Its layers are as costly as the others': then it is the rank that is slow."""
    (advice,) = read(tmp_path, steps("1f1b", 8, SLOW, 8), "1f1b", cuts).advice
    assert advice.cause == "slow stage" and flag in advice.try_ and bool(flag) == bool(advice.try_)
