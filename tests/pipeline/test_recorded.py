"""What is read of a recorded step: when ranks turned to their actions, what these took, and the schedule."""

from __future__ import annotations

import pytest

from instep.events import PIPELINE, STEP, Event, Timeline
from instep.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from instep.pipeline.recorded import recorded_actions, steps_of
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, bubble_rate, simulate
from instep.timeline.stages import pipeline_figures


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


def test_a_weight_gradient_alone_is_a_backward_of_the_first_stage() -> None:
    one = simulate(generate("zb-h1", 2, 2), StageTimes([1, 1], [0, 1], [2, 1])).events
    (step,) = steps_of(Timeline(one), 0)
    assert (0, INPUT_GRADIENT) not in step.times
    kinds = {(action.stage, action.kind) for row in step.schedule().rows for action in row}
    assert (0, BACKWARD) in kinds and (0, WEIGHT_GRADIENT) not in kinds


def test_a_step_that_a_rank_has_not_ended_is_none() -> None:
    events = simulate(generate("1f1b", 2, 2), StageTimes(1, 1, 1)).events
    (step,) = steps_of(Timeline(e for e in events if e.name != STEP or e.rank == 0), 0)
    assert [*step.rows] == [0]


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
