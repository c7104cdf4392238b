"""The simulator, held to runs that were drawn by hand, and read as a measured timeline is."""

from __future__ import annotations

import pytest

from instep.events import STEP, Event, Timeline
from instep.pipeline.actions import Schedule
from instep.pipeline.recorded import KINDS
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import NS, StageTimes, bubble_rate, makespan_s, simulate
from instep.timeline.bubbles import DRAIN, FILL, STEADY, StepWindow, bubbles

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


def test_one_micro_batch_leaves_all_ranks_but_one_waiting():
    for name in ("naive", "gpipe", "1f1b"):
        assert bubble_rate(simulate(generate(name, 4, 1), StageTimes(1, 1, 1))) == pytest.approx(3 / 4)


def test_what_does_not_end_is_not_simulated():
    with pytest.raises(ValueError, match="does not come to its end"):
        simulate(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), EVEN)


def test_times_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="expected weight_gradient_s of 2 stages, got 3"):
        simulate(generate("gpipe", 2, 2), StageTimes([1, 2], 1, [1, 2, 3]))


def test_a_timeline_without_computation_has_no_rate():
    with pytest.raises(ValueError, match="expected a timeline with forwards and backwards"):
        bubble_rate(Timeline([Event(0, "host", STEP, 0, S, step=0)]))
