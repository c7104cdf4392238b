"""The simulator, held to runs that were drawn by hand; and what is read of its steps and of recorded ones."""

from __future__ import annotations

import pytest

from instep.events import PIPELINE, STEP, Event, Timeline
from instep.pipeline.actions import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from instep.pipeline.recorded import KINDS, recorded_actions, steps_of
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import NS, StageTimes, bubble_rate, makespan_s, simulate
from instep.timeline.bubbles import DRAIN, FILL, STEADY, StepWindow, bubbles
from instep.timeline.stages import pipeline_figures

S = 1_000_000_000
EVEN = StageTimes(1, 1, 1, 0.5)
# 1f1b, 2 ranks, 2 micro-batches; forward 1, backward 2, a message 0.5:
#
#           0    1    2    3    4    5    6    7    8    9    10
#   rank 0  |0F0 |0F1 |              |0B0      |    |0B1      |
#                 \                 /              /
#   rank 1         -|1F0 |1B0      |1F1 |1B1      |
DRAWN = {
    "0F0": (0, 1), "0F1": (1, 2), "0B0": (5, 7), "0B1": (8, 10),
    "1F0": (1.5, 2.5), "1B0": (2.5, 4.5), "1F1": (4.5, 5.5), "1B1": (5.5, 7.5),
}  # fmt: skip


def computed(schedule: Schedule, times: StageTimes, **options: int) -> dict[str, tuple[float, float]]:
    found = simulate(schedule, times, **options).events
    return {
        f"{one.stage}{KINDS[one.name]}{one.leaf}": (one.start_ns / NS, one.end_ns / NS)
        for one in found
        if one.lane == "compute"
    }


def test_the_run_is_the_one_that_is_drawn():
    assert computed(generate("1f1b", 2, 2), EVEN) == DRAWN


def test_the_timeline_has_what_a_recorded_one_has():
    timeline = simulate(generate("1f1b", 2, 2), EVEN, step=7)
    assert timeline.ranks == [0, 1]
    assert timeline.steps == [7] and all(timeline.window(rank, 7) for rank in timeline.ranks)
    spans = [event for event in timeline.of(1, 7) if event.lane == "compute"]
    assert [(event.name, event.leaf, event.stage, event.start_ns / S) for event in spans] == [
        ("forward", 0, 1, 1.5), ("backward", 0, 1, 2.5), ("forward", 1, 1, 4.5), ("backward", 1, 1, 5.5),
    ]  # fmt: skip
    messages = [event for event in timeline.of(1, 7) if event.lane == "communication"]
    # That of micro-batch 1 is sent at 2; its receive is posted at 2.5, when 1F0 has ended.
    assert [(event.name, event.leaf, event.peer, event.start_ns / S) for event in messages] == [
        ("activations", 0, 0, 1.0), ("activations", 1, 0, 2.5),
    ]  # fmt: skip
    window = timeline.window(0, 7)
    assert window is not None
    assert (window.name, window.duration_s) == (STEP, 10)


def test_bubbles_are_read_from_it_as_from_a_measured_one():
    timeline = simulate(generate("1f1b", 2, 2), EVEN)

    def found(rank):
        return [(one.start_ns / S, one.end_ns / S, one.peer) for one in bubbles(timeline.of(rank, 0))]

    assert found(0) == [(2, 4.5, 1), (4.5, 5, -1), (7, 7.5, 1), (7.5, 8, -1)]
    assert found(1) == [(0, 1, 0), (1, 1.5, -1), (7.5, 10, 0)]
    phases = [[one.cause for one in bubbles(timeline.of(rank, 0))] for rank in range(2)]
    assert phases == [[STEADY] * 4, [FILL, FILL, DRAIN]]
    assert not any(one.is_slowness for rank in range(2) for one in bubbles(timeline.of(rank, 0)))
    window = StepWindow.of(timeline.of(0, 0))
    assert window is not None
    assert window.micro_batches == 2


def test_every_moment_of_a_rank_is_work_or_a_bubble():
    for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
        timeline = simulate(generate(name, 4, 8), EVEN)
        for rank in timeline.ranks:
            window = StepWindow.of(timeline.of(rank, 0))
            assert window is not None
            idle = sum(one.end_ns - one.start_ns for one in bubbles(timeline.of(rank, 0)))
            assert idle + sum(end - start for start, end in window.at_work()) == window.end_ns


def test_stages_may_differ():
    """The second takes three times as long: rank 0 waits for it."""
    slow = StageTimes([1, 3], [1, 3], [1, 3], [0.5, 0.25])
    assert computed(generate("gpipe", 2, 2), slow) == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (13.75, 15.75), "0B1": (19.75, 21.75),
        "1F0": (1.5, 4.5), "1F1": (4.5, 7.5), "1B0": (7.5, 13.5), "1B1": (13.5, 19.5),
    }  # fmt: skip


def test_a_message_that_takes_long_hides_only_under_what_its_receive_was_posted_before():
    """Messages of 4 under computation of 1: posted one action ahead they are on their way too late."""
    schedule = generate("gpipe", 2, 3)
    slow = StageTimes(1, 1, 1, 4)
    assert [computed(schedule, slow, ahead=ahead)["1F2"][0] for ahead in (0, 1, 2)] == [15, 10, 7]


def test_a_rate_counts_from_a_ranks_first_computation_to_its_last():
    """zb-h2 with equal times: every rank is busy throughout, each a little later than the one before."""
    timeline = simulate(generate("zb-h2", 4, 8), StageTimes(1, 1, 1))
    assert bubble_rate(timeline) == 0
    assert makespan_s(timeline) == 27
    assert bubble_rate(simulate(generate("1f1b", 4, 8), StageTimes(1, 1, 1))) == pytest.approx(3 / 11)


def test_an_action_begins_when_the_rank_turns_to_it() -> None:
    def event(name: str, start_ns: int, end_ns: int, stage: int = 0) -> Event:
        return Event(0, "compute", name, start_ns, end_ns, stage=stage)

    recorded = [
        event(PIPELINE, 0, 5, stage=-1),  # of the step, not of an action
        event("forward", 10, 20),
        event("forward", 22, 30),
        event(PIPELINE, 31, 50),
        event(PIPELINE, 50, 60),
        event("backward", 63, 80),
        event("backward", 85, 99),
    ]
    found = recorded_actions(recorded)
    whole = [one.whole for one in found]
    assert [(one.start_ns, one.end_ns) for one in whole] == [(10, 20), (20, 30), (60, 80), (80, 99)]
    assert [round(one.took_s * 1e9) for one in found] == [10, 10, 20, 19]
    assert [round(one.computed_s * 1e9) for one in found] == [10, 8, 17, 14]


def test_a_simulated_step_is_read_as_it_was_made() -> None:
    """Two pipelines of one timeline, told apart by their micro-batches; the second has numbers 4 to 7."""
    made = generate("zb-h1", 2, 4)
    one = simulate(made, StageTimes([3, 2], [1, 2], [2, 4], 0.5)).events
    other = [e._replace(rank=e.rank + 2, leaf=e.leaf + 4 if e.leaf >= 0 else -1) for e in one]
    first, second = steps_of(Timeline([*one, *other]), 0)
    assert [*second.rows] == [2, 3] and second.leaves == [4, 5, 6, 7]
    for step in (first, second):
        assert step.schedule().rows == made.rows
        assert step.times == {
            (0, FORWARD): 3,
            (0, INPUT_GRADIENT): 1,
            (0, WEIGHT_GRADIENT): 2,
            (1, FORWARD): 2,
            (1, INPUT_GRADIENT): 2,
            (1, WEIGHT_GRADIENT): 4,
        }
        messages = [event.duration_s for one in step.actions for event in one.messages]
        # One of the eight was sent while its receiver computed: it may have been there before it was wanted.
        assert len(messages) == 7 and set(messages) == {0.5}
        assert bubble_rate(step.timeline) == pytest.approx(bubble_rate(Timeline(one)))


def test_what_is_around_a_computation_counts_for_its_stage_and_for_no_bubble() -> None:
    """Ranks compute from a second after they have turned to an action; the figures are of whole ones."""
    whole = simulate(generate("1f1b", 2, 4), StageTimes(4, 4, 4)).events
    bare = [e._replace(start_ns=e.start_ns + 10**9) if e.lane == "compute" else e for e in whole]
    told, as_whole = (pipeline_figures([Timeline(its)], "1f1b") for its in (bare, whole))
    assert told is not None and as_whole is not None
    assert (told.stages[1].forward_s, told.stages[1].backward_s) == (4, 8)
    # But of the first one nothing says when its rank turned to it.
    assert told.stages[0].forward_s == pytest.approx(4 - 1 / 4)
    assert told.bubble == pytest.approx(as_whole.bubble, abs=0.02)
