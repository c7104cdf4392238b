"""Illegal schedules are refused with the grid, the place, and what to do; each check has its control."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from instep.pipeline.actions import BACKWARD, FORWARD, Action, GridPlace, Schedule
from instep.pipeline.check import IllegalSchedule, activations, check, peak_activations
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, simulate
from tests.pipeline.drawn import schedules


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = [*schedule.rows]
    rows[rank] = tuple(row)
    return Schedule(tuple(rows), schedule.stage_ranks, schedule.num_micro_batches)


def refusal(text: str, **options: float) -> str:
    with pytest.raises(IllegalSchedule) as refused:
        check(Schedule.parse(text), **options)
    return str(refused.value)


def test_a_backward_before_its_forward_is_refused():
    assert refusal("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1") == (
        "rank 1 waits for ever: 1B0 needs 1F0, which comes later in its row: put 1F0 before it\n\n"
        "rank 0: 0F0 0F1  .  0B0 0B1\n"
        "rank 1:  .   .   .  1B0 1F0 1F1 1B1\n"
        "                    ^^^ ^^^ <-- here"
    )


def test_ranks_that_wait_for_each_other_are_refused():
    assert refusal("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1") == (
        "deadlock: rank 0 at 0B0 for 1B0, rank 1 at 1F1 for 0F1: "
        "put what is waited for before what waits\n\n"
        "rank 0: 0F0  .   .  0B0 0F1 0B1\n"
        "                    ^^^ <-- here\n"
        "rank 1:  .  1F0  .  1F1 1B0 1B1\n"
        "                    ^^^ <-- here"
    )


@pytest.mark.parametrize(
    ("text", "words", "places"),
    [
        ("0F0 0F1 0B0", "there is no 0B1 or 0I1: add it to rank 0", [(0, 3)]),
        ("0F0 0B0 0B1", "there is no 0F1: add it to rank 0", [(0, 3)]),
        ("0F0 0I0", "there is no 0W0: add it to rank 0", [(0, 2)]),
        ("0F0 0W0", "there is no 0I0: add it to rank 0", [(0, 2)]),
        ("0F0 0F0 0B0", "0F0 is there twice: take one of them out", [(0, 0), (0, 1)]),
        ("0F0 0I0 0W0 0W0", "0W0 is there twice: take one of them out", [(0, 2), (0, 3)]),
        ("0F0 0B0 0W0", "0W0 is part of 0B0: take one of them out", [(0, 1), (0, 2)]),
        ("0F0 0I0 0B0", "0I0 is part of 0B0: take one of them out", [(0, 1), (0, 2)]),
        ("0F0 1F0 1B0 0B0\n1F0 1B0", "1F0 is on rank 1, but stage 1 is held by rank 0: move it", [(1, 0)]),
        ("0F0 0W0 0I0", "0W0 needs 0I0, which comes later in its row: put 0I0 before it", [(0, 1), (0, 2)]),
        ("0F0 0F999999999 0B0", "there is no 0F1: add it to rank 0", [(0, 3)]),
    ],
)
def test_what_is_missing_doubled_or_misplaced_is_named_and_marked(text, words, places):
    with pytest.raises(IllegalSchedule, match=re.escape(words)) as refused:
        check(Schedule.parse(text))
    assert list(refused.value.places) == [GridPlace(*place) for place in places]


def test_between_input_and_weight_gradient_a_part_stays():
    row = Schedule.parse("0F0 0F1 0I0 0I1 0W0 0W1").rows[0]
    assert activations(row, kept=0.25) == [1, 2, 1.25, 0.5, 0.25, 0]
    assert peak_activations(Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1"), kept=0.25) == [1.25]


def a_row(schedule: Schedule, data: st.DataObject) -> tuple[int, list[Action]]:
    """A rank, and a copy of what it does."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return rank, [*schedule.rows[rank]]


@given(schedules(), st.data())
def test_without_any_one_action_a_schedule_is_refused(schedule, data):
    rank, row = a_row(schedule, data)
    gone = row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(IllegalSchedule, match=rf"there is no .*{gone}: add it to rank {rank}|no {gone} or"):
        check(changed(schedule, rank, row))


@given(schedules(), st.data())
def test_with_any_one_action_twice_a_schedule_is_refused(schedule, data):
    rank, row = a_row(schedule, data)
    twice = row[data.draw(st.integers(0, len(row) - 1))]
    row.insert(data.draw(st.integers(0, len(row))), twice)
    with pytest.raises(IllegalSchedule, match=f"{twice} is there twice"):
        check(changed(schedule, rank, row))


@given(schedules(), st.data())
def test_with_a_forward_and_its_backward_swapped_a_schedule_is_refused(schedule, data):
    rank, row = a_row(schedule, data)
    forward = data.draw(st.sampled_from([action for action in row if action.kind == FORWARD]))
    backward = next(a for a in row if a.result == forward._replace(kind="I"))
    i, j = row.index(forward), row.index(backward)
    row[i], row[j] = row[j], row[i]
    with pytest.raises(IllegalSchedule, match=r"waits? for ever"):
        check(changed(schedule, rank, row))


@given(schedules(), st.data())
def test_what_is_refused_is_what_does_not_come_to_its_end(schedule, data):
    """Any two actions of a row swapped, which may be legal or not: the check and the simulator agree."""
    rank, row = a_row(schedule, data)
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[i], row[j] = row[j], row[i]
    swapped = changed(schedule, rank, row)
    try:
        check(swapped)
    except IllegalSchedule:
        with pytest.raises(ValueError, match="does not come to its end"):
            simulate(swapped, StageTimes(1, 1, 1))
    else:
        simulate(swapped, StageTimes(1, 1, 1))


@given(schedules(ranks=2), st.data())
def test_a_rank_that_finishes_each_micro_batch_starves_a_rank_that_fills(schedule, data):
    """The deadlock: one rank waits for a backward before it sends what the other wants to have first."""
    assume(schedule.num_stages == schedule.num_ranks and schedule.num_micro_batches > 1)
    rank = data.draw(st.integers(0, schedule.num_ranks - 2))
    one_by_one = [
        Action(rank, kind, k) for k in range(schedule.num_micro_batches) for kind in (FORWARD, BACKWARD)
    ]
    all_at_once = [Action(rank + 1, kind, k) for kind in "FB" for k in range(schedule.num_micro_batches)]
    rows = [*schedule.rows]
    rows[rank], rows[rank + 1] = tuple(one_by_one), tuple(all_at_once)
    with pytest.raises(IllegalSchedule, match=f"deadlock: .*rank {rank} at {rank}B0 for {rank + 1}B0"):
        check(Schedule(tuple(rows), schedule.stage_ranks, schedule.num_micro_batches))


def test_a_legal_schedule_may_be_anything_that_runs():
    """As a user would bring it: uneven, W where it fits, B and I by micro-batch."""
    check(Schedule.parse("0F0 0F1 0B0 0I1 0W1\n1F0 1I0 1F1 1B1 1W0"))
    assert peak_activations(generate("gpipe", 2, 3)) == [3, 3]
