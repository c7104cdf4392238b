"""Actions and schedules as text: what is printed is read again, and what is no schedule is refused."""

from __future__ import annotations

import pytest

from instep.pipeline.actions import COMPUTE, Action, GridPlace, Schedule

F, B, I, W = COMPUTE  # noqa: E741
TWO = """# 2 ranks, 2 stages, 3 micro-batches
rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2
rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2
"""


@pytest.mark.parametrize("kind", COMPUTE)
def test_an_action_prints_and_parses(kind):
    action = Action(12, kind, 3)
    assert str(action) == f"12{kind}3"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "2F0 ", "-1F0", "2F-1", "2F0F0", "9" * 10 + "F0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a stage, one of F, B, I, W, .* such as 2F0, got"):
        Action.parse(text)


def test_the_input_gradient_is_what_others_need_of_a_full_backward():
    assert Action(1, B, 2).result == Action(1, I, 2)
    assert [Action(1, kind, 2).result.kind for kind in (F, I, W)] == [F, I, W]


def test_a_forward_needs_the_stage_before_and_a_backward_its_forward_and_the_stage_after():
    schedule = Schedule.parse("0F0 0B0\n1F0 1I0 1W0")
    assert schedule.needs(Action(0, F, 0)) == []
    assert schedule.needs(Action(1, F, 0)) == [Action(0, F, 0)]
    assert schedule.needs(Action(1, I, 0)) == [Action(1, F, 0)]
    assert schedule.needs(Action(0, B, 0)) == [Action(0, F, 0), Action(1, I, 0)]
    assert schedule.needs(Action(1, W, 0)) == [Action(1, I, 0)]


def test_a_schedule_prints_as_the_grid_that_it_is_read_from():
    schedule = Schedule.parse(TWO)
    assert str(schedule) == TWO
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches) == (2, 2, 3)


def test_only_the_order_within_a_row_is_read():
    loose = "0F0,0F1 0B0  # the first rank\n\n  # nothing here\n1F0,.,.,1B0,,1F1\t1B1,"
    assert Schedule.parse(loose).rows == Schedule.parse("rank 0: 0F0 0F1 0B0\nrank 1: 1F0 1B0 1F1 1B1").rows


def test_a_stage_is_held_by_the_rank_that_works_on_it():
    assert Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0").stage_ranks == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a row of actions per rank, got none"),
        ("0F0 0B0\n,,", "rank 1 has no action"),
        ("0F0 2F0 2B0 0B0", "expected stages 0 to 2, but no rank has an action of stage 1"),
        ("0F0 999999999F0", "expected stages 0 to 999999999, but no rank has an action of stage 1"),
        ("# two\nrank 0: 0F0 0B0\nrank 2: 1F0 1B0", "line 3: expected rank 1, got rank 2"),
        ("0F0 0B0\n1F0 1Q0", "line 2: expected a stage, one of F, B, .* got '1Q0'"),
        ("(0F0;0B1)OVERLAP_F_B", "line 1: expected a stage, one of"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_line(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.parse(text)


def test_a_place_is_marked_under_its_action():
    grid = Schedule.parse(TWO).grid([GridPlace(0, 3), GridPlace(1, 0), GridPlace(1, 6)])
    assert grid == (
        "rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2\n"
        "                        ^^^ <-- here\n"
        "rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2\n"
        "            ^^^                     ^^^ <-- here"
    )


def test_what_cannot_run_stands_behind_the_rest():
    assert Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1").grid() == (
        "rank 0: 0F0  .   .  0B0 0F1 0B1\n"
        "rank 1:  .  1F0  .  1F1 1B0 1B1"
    )  # fmt: skip


def test_wide_numbers_keep_the_columns():
    rows = "\n".join(f"{rank}F9 {rank}B9" for rank in range(11))
    lines = Schedule.parse(rows).grid().splitlines()
    assert lines[0].startswith(" rank 0: ")
    assert lines[10].startswith("rank 10: ")
    assert len({line.index(":") for line in lines}) == 1
    assert Schedule.parse("\n".join(lines)).rows == Schedule.parse(rows).rows
