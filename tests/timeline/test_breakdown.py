"""The breakdown of a run, and how much communication slows compute down: from drawn steps."""

import json
from dataclasses import replace
from typing import Any

import pytest

from instep.timeline.breakdown import RankBreakdown, breakdown, slowdown
from instep.timeline.parts import PARTS, Parts, parts
from tests.timeline.drawn import draw


def steps(*drawings: str, rank: int = 0) -> list[Parts]:
    found = [parts(draw(drawing, rank=rank, step=step)) for step, drawing in enumerate(drawings)]
    return [row for row in found if row is not None]


SHORT = """
    compute         |ffbb....u.|
    host            |....SSSS..|
    communication 0 |...X22XX..|
"""
LONG = """
    compute         |ffffbbbb....u.....|
    host            |........SSSS.lll..|
    communication 0 |......XX22XX......|
"""


def test_means_over_steps_by_part_cause_and_name() -> None:
    found = breakdown(steps(SHORT, LONG, rank=2))
    assert (found.rank, found.steps) == (2, 2)
    assert (found.wall_s, found.median_s) == (pytest.approx(0.014), pytest.approx(0.014))
    assert list(found.parts) == list(PARTS)
    assert found.parts == pytest.approx(
        {
            "compute": 0.006,
            "exposed communication": 0.002,
            "waiting for a slower rank": 0.002,
            "waiting for data": 0,
            "update": 0.001,
            "host": 0.0015,
            "unattributed": 0.0015,
        }
    )
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert found.causes == pytest.approx({"gradient sync": 0.002})
    assert found.hosts == pytest.approx({"ledger": 0.0015})
    assert found.hidden_s == pytest.approx(0.0015)
    assert found.unattributed_share == pytest.approx((1 / 10 + 2 / 18) / 2)


def test_the_first_two_of_more_than_four_steps_warm_up() -> None:
    assert breakdown(steps(LONG, LONG, SHORT, SHORT, SHORT)).wall_s == pytest.approx(0.010)
    assert breakdown(steps(LONG, LONG, SHORT, SHORT)).wall_s == pytest.approx(0.014)
    backwards = steps(LONG, LONG, SHORT, SHORT, SHORT)[::-1]
    assert breakdown(backwards).wall_s == pytest.approx(0.010)


def test_steps_of_no_rank_or_two_are_refused() -> None:
    with pytest.raises(ValueError, match="expected steps of one rank, got 0 steps"):
        breakdown([])
    with pytest.raises(ValueError, match=r"got 2 steps of ranks \[0, 1\]"):
        breakdown(steps(SHORT) + steps(SHORT, rank=1))


def test_a_breakdown_travels_as_json() -> None:
    for found in (breakdown(steps(SHORT, LONG)), breakdown(steps(SHORT), slowdown=0.25)):
        assert RankBreakdown.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": "0"}, "rank in a rank's breakdown"),
        ({"wall_s": None}, "wall_s in"),
        ({"hidden_s": float("nan")}, "hidden_s in"),
        ({"parts": [1.0]}, "parts in"),
        ({"causes": {"gradient sync": "<script>"}}, "causes in"),
        ({"more": 1}, "with fields rank, steps"),
    ],
)
def test_what_is_no_breakdown_is_refused(change: dict[str, Any], message: str) -> None:
    good = breakdown(steps(SHORT)).to_json()
    with pytest.raises(ValueError, match=message):
        RankBreakdown.from_json({**good, **change})


# A backward takes 8 alone. With 6 of communication under it one takes 10: in these 6 it did what takes 4.
OVERLAP = """
    compute         |ffbbbbbbbb.ffbbbbbbbbbb....u|
    host            |.......................SSSS.|
    communication 0 |...............XXXXXX.......|
    communication 1 |.......................XXXX.|
"""
INSIDE = """
    compute         |ffbbbbbbbb.ffbbbbbbbbbbbbbbu|
    host            |.......................SSSS.|
    communication 0 |...............XXXXXX..XXXX.|
"""


@pytest.mark.parametrize("drawing", [OVERLAP, INSIDE], ids=["after backward", "the wait inside backward"])
def test_communication_under_a_backward_slows_it_by_half(drawing: str) -> None:
    assert slowdown([draw(drawing)]) == pytest.approx(2 / 4)


def test_the_slowdown_is_of_the_median_step() -> None:
    slower = OVERLAP.replace("XXXXXX.......", "XXXXXXX......")  # 7 under it, 2 more: 2 / 5
    less = OVERLAP.replace("XXXXXX.......", "XXXXX........")
    assert slowdown([draw(drawing, step=s) for s, drawing in enumerate([slower, OVERLAP, less])]) == 0.5


@pytest.mark.parametrize(
    "drawing",
    [
        "compute |ffbbbb|\ncommunication 0 |...XX.|",
        "compute |ffbbbbffbbbb.|\ncommunication 0 |............X|",
        "compute |ffff|",
    ],
    ids=["a single micro-batch", "nothing overlaps", "no backward"],
)
def test_without_both_kinds_of_backward_the_slowdown_is_unknown(drawing: str) -> None:
    assert slowdown([draw(drawing)]) is None
    assert slowdown([]) is None


def test_a_breakdown_keeps_the_slowdown_it_is_given() -> None:
    found = breakdown(steps(SHORT), slowdown([draw(OVERLAP)]))
    assert found == replace(breakdown(steps(SHORT)), slowdown=pytest.approx(0.5))
