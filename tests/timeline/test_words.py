"""A breakdown, a slow rank and advice as lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.timeline.advice import Advice
from instep.timeline.breakdown import RankBreakdown
from instep.timeline.parts import PARTS
from instep.timeline.straggler import Slow
from instep.timeline.words import lines, slowness

SLOW = Slow(rank=2, phase="its data", since=40, excess_s=0.0123, share=0.3, steps=9)


def row(rank: int = 0, hidden_s: float = 0.0, **parts: float) -> RankBreakdown:
    """``parts`` by the first letters of their names, in seconds."""
    told = {name: parts.get(name.split()[0], 0.0) for name in PARTS}
    wall = sum(told.values())
    return RankBreakdown(rank, 9, wall, wall, told, {}, {}, hidden_s, 0.0)


def test_the_shares_are_means_over_ranks_and_add_up():
    ((label, text),) = lines([row(compute=0.06, exposed=0.04), row(1, compute=0.1)], None, [])
    assert label == "time"
    assert (
        text
        == "100 ms a step on average over 9 = compute 80 ms (80.0%) + exposed communication 20 ms (20.0%)"
    )


def test_a_part_of_next_to_nothing_is_not_said():
    ((_, text),) = lines([row(compute=0.9996, update=0.0004)], None, [])
    assert "update" not in text


@pytest.mark.parametrize(
    ("slowdown", "more"), [(None, ""), (0.0, ""), (0.25, ", which makes it 25 % slower")]
)
def test_hidden_communication_is_said_with_what_it_costs_if_that_is_known(slowdown, more):
    told = [replace(row(compute=0.1, hidden_s=0.02), slowdown=slowdown), row(1, compute=0.1, hidden_s=0.04)]
    assert list(lines(told, None, []))[1] == ("", f"30 ms of communication hidden under compute{more}")


def test_the_share_of_hidden_gathers_is_said_where_weights_are_gathered():
    gathers = {"gathers_s": 0.01, "gathers_hidden_s": 0.008}
    told = [replace(row(compute=0.1, hidden_s=0.02), **gathers), row(1, compute=0.1, hidden_s=0.02)]
    said = "20 ms of communication hidden under compute; among it 80 % of the gathers of weights (5.0 ms)"
    assert list(lines(told, None, []))[1] == ("", said)


def test_the_slow_rank_is_named_with_what_in_how_much_and_since_when():
    assert slowness(SLOW) == (
        "rank 2 is slow in its data: 12 ms a step more than the others (30 %), since step 40"
    )
    assert list(lines([row(compute=0.1)], SLOW, []))[1] == ("slow", slowness(SLOW))


def test_each_advice_is_a_line_with_its_gain_and_what_to_try_and_only_the_first_has_the_label():
    advice = [
        Advice("gloo", "Use shared memory.", 4.2, 0.17, "--parallel.backend shm", "measured"),
        Advice("loader", "Load ahead.", 1.0, 0.04, "", "measured"),
    ]
    assert list(lines([row(compute=0.1)], None, advice))[1:] == [
        ("advice", "Use shared memory. Predicted gain: about 17 % (4.2 ms a step): --parallel.backend shm"),
        ("", "Load ahead. Predicted gain: about 4 % (1.0 ms a step)"),
    ]


def test_without_a_breakdown_there_is_nothing_to_say():
    assert list(lines([], SLOW, [])) == []
