"""Illegal schedules are refused with the grid, the place and the fix; messages follow from the others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.pipeline.actions import COMPUTE, FORWARD, RECEIVES, SENDS, Action, GridPlace, Rows, Schedule
from instep.pipeline.check import IllegalSchedule, activations, check, peak_activations
from instep.pipeline.communication import programs, receiver, send_of
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


def test_a_legal_schedule_may_be_anything_that_runs():
    """As a user would bring it: uneven, W where it fits, B and I by micro-batch."""
    check(Schedule.parse("0F0 0F1 0B0 0I1 0W1\n1F0 1I0 1F1 1B1 1W0"))
    assert peak_activations(generate("gpipe", 2, 3)) == [3, 3]


def words(program):
    return " ".join(map(str, program))


def require_same_order(schedule: Schedule, rows: Rows) -> None:
    """Every rank receives what another sends it in the order in which that one sends it."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in SENDS:
                sent[rank, receiver(schedule, action)].append(action)
            elif action.kind in RECEIVES:
                received[schedule.stage_ranks[send_of(action).stage], rank].append(send_of(action))
    assert sent == received


def test_a_send_follows_what_it_sends_and_a_receive_comes_one_action_ahead():
    first, second = programs(generate("1f1b", 2, 2))
    assert words(first) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
    assert words(second) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_receives_are_posted_as_far_ahead_as_wanted():
    schedule = generate("1f1b", 2, 2)
    assert words(programs(schedule, ahead=0)[0]) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert words(programs(schedule, ahead=9)[0]) == "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1"


def test_between_stages_of_one_rank_nothing_is_sent():
    """The turn of the V: rank 1 holds stages 1 and 2."""
    both = programs(Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert words(both[0]) == "3RECV_F0 0F0 0SEND_F0 3F0 0RECV_B0 3B0 3SEND_B0 0B0"
    assert words(both[1]) == "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0 1SEND_B0"
    assert all(action.kind in COMPUTE for action in programs(generate("interleaved", 1, 4, 3))[0])


def test_receives_keep_the_order_of_the_sends_where_uses_do_not():
    """Rank 0 sends 0F0 before 0F1; rank 1 needs the second first."""
    schedule = Schedule.parse("0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0")
    received = [action for action in programs(schedule)[1] if action.kind in RECEIVES]
    assert words(received) == "1RECV_F0 1RECV_F1"
    require_same_order(schedule, programs(schedule))


@given(schedules(), st.integers(0, 3))
def test_every_message_has_two_ends_and_every_receive_stands_before_its_use(schedule, ahead):
    rows = programs(schedule, ahead)
    require_same_order(schedule, rows)
    simulate(schedule, StageTimes(1, 1, 1), ahead=ahead)  # which comes to its end
    assert [[action for action in row if action.kind in COMPUTE] for row in rows] == [
        list(row) for row in schedule.rows
    ]
    ends = Counter(action for row in rows for action in row if action.kind in SENDS)
    assert ends == Counter(send_of(action) for row in rows for action in row if action.kind in RECEIVES)
    crossings = sum(a != b for a, b in zip(schedule.stage_ranks, schedule.stage_ranks[1:], strict=False))
    assert ends.total() == 2 * crossings * schedule.num_micro_batches
    for row in rows:
        there = set()
        for action in row:
            there.add(action)
            for needed in schedule.needs(action) if action.kind in COMPUTE else ():
                if schedule.stage_ranks[needed.stage] != schedule.stage_ranks[action.stage]:
                    assert (
                        Action(action.stage, "RECV_F" if needed.kind == "F" else "RECV_B", needed[2]) in there
                    )
