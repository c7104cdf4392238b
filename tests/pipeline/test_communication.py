"""What is sent and received: derived from the compute order, early, and in the order of the sends."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from instep.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Rows, Schedule
from instep.pipeline.communication import programs, receiver, send_of
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, simulate
from tests.pipeline.drawn import schedules


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
