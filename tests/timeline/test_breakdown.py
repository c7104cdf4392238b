"""Parts, bubbles and buckets of a step, counted in drawn steps and exact for any events; the slowdown."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC, PARAMETER_UPDATE, STEP, WAITS, Event, Timeline
from instep.timeline.breakdown import (
    DATA,
    EXPOSED,
    IDLE,
    Parts,
    RankBreakdown,
    breakdown,
    parts,
    slowdown,
)
from instep.timeline.bubbles import Bubble, bubbles
from instep.timeline.bucket_times import bucket_rows
from tests.timeline.drawings import MS, draw, expected

DRAWINGS = {
    "naive: all buckets after backward": """
        compute         |fffbbbfffbbb............cuu....|
        host            |............SSSSSSSSSSSS...ll.h|
        communication 0 |............111AXX.............|
        communication 1 |............qqqqqq1AXX.........|
        expected        |cccccccccccc111xxx1xxxxxcuuhh.h|
        """,
    "flat, and this rank was last: no wait": """
        data            |dd...................|
        compute         |..fffbbbb.......uu...|
        host            |.........SSSSSSS...L.|
        communication 0 |.........AXXXXXX.....|
        expected        |ddcccccccxxxxxxxuu.x.|
        """,
    "bucketed: the first bucket is hidden but for its end": """
        compute         |ffffbbbbbbbb........uu|
        host            |............SSSSSSSS..|
        communication 0 |......q2AXXXXX........|
        communication 1 |..............22AXXX..|
        expected        |ccccccccccccxx22xxxxuu|
        hidden          |........####..........|
        """,
    "gradient sync inside backward, as the last of its hooks": """
        compute         |ffffbbbbbbbbbbb.uu|
        host            |........SSSSSSS...|
        communication 0 |......AXX11XXX....|
        expected        |ccccccccx11xxxx.uu|
        hidden          |......##..........|
        """,
    "batch-norm statistics inside forward": """
        compute         |ffffffffbb|
        host            |..NN..NN..|
        expected        |ccxxccxxcc|
        """,
    "a step that nobody declared: only waits and the rest": """
        compute         |.ffbb........|
        host            |.....SSSS....|
        communication 0 |....A.22XX...|
        expected        |.ccccx22x....|
        hidden          |....#........|
        """,
    "a device goes on while the thread that issued it waits": """
        compute         |..fffffbbbbbbbb.uu|
        host            |ffbb....SSSSSSSS..|
        communication 0 |........AXXXXXXX..|
        expected        |hhcccccccccccccxuu|
        hidden          |........#######...|
        """,
    "a world of one exchanges in the thread that trains": """
        compute         |ffbb....u|
        host            |..SSSSSS.|
        communication 0 |....AXXX.|
        expected        |ccccxxxxu|
        """,
    "host code in host code, and compute in it": """
        host            |eeeeeeeeee.lllll|
        host            |..hh.........h..|
        compute         |....ff..........|
        expected        |hhhhcchhhh.hhhhh|
        """,
    "a wait for a wait": """
        host            |SSSSSSSSSS|
        host            |..LLLL....|
        communication 0 |....3333..|
        expected        |xxxx3333xx|
        """,
    "work inside a wait is work": """
        host            |PPPPPPPPPP|
        compute         |...cuu....|
        expected        |xxxcuuxxxx|
        """,
    "threads: what the replicas do is under one event": """
        host            |.........l|
        compute         |rrrrrrrcu.|
        replica 0       |dffbbb....|
        replica 1       |dffbbbb...|
        expected        |ccccccccuh|
        """,
    "nothing is known": """
        host            |....|
        expected        |....|
        """,
}


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def counted(found: Parts) -> dict[str, int]:
    """The parts in whole ms, by the letters of a drawing."""
    figures = {
        "c": found.compute,
        "x": found.exposed_s,
        "d": found.data,
        "u": found.update,
        "h": found.host_s,
        ".": found.unattributed,
        **{str(peer): waited for peer, waited in found.waiting.items()},
    }
    assert all(ns(figure) % MS == 0 for figure in figures.values())
    return {letter: ns(figure) // MS for letter, figure in figures.items() if figure}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_the_parts_are_those_that_are_drawn(drawing: str) -> None:
    found = parts(draw(drawing))
    assert found is not None
    assert counted(found) == expected(drawing)
    hidden = expected(drawing, "hidden")["#"] if "hidden" in drawing.split("|")[-3] else 0
    assert ns(found.hidden) == hidden * MS


def test_gathers_of_weights_are_communication_and_a_wait_for_one_is_exposed() -> None:
    """Unit 1 comes under the forward of unit 0, unit 2 too late; the exchange is no gather."""
    drawing = """
        compute         |ffffffffffffbbbb....u|
        host            |........GGG.....SSSS.|
        communication 1 |..GGG...............|
        communication 2 |......GGGGG.........|
        communication 0 |...........XXXXXXXXX|
        expected        |ccccccccxxxcccccxxxxu|
        """
    found = parts(draw(drawing))
    assert found is not None
    assert counted(found) == expected(drawing)
    assert {name: ns(figure) // MS for name, figure in found.exposed.items()} == {
        "parameter gather": 3,
        "gradient sync": 4,
    }
    assert (ns(found.gathers) // MS, ns(found.gathers_hidden) // MS) == (8, 5)
    assert ns(found.hidden) // MS == 5 + 5


def test_a_wait_that_knows_its_peer_is_all_for_that_rank() -> None:
    drawing = """
        compute         |ffbb......|
        host            |....PPPPPP|
        communication 0 |....>>.<<<|
        expected        |cccc000000|
        """
    found = parts(draw(drawing, rank=1, peer=0))
    assert found is not None
    assert counted(found) == expected(drawing)
    assert found.waiting == {0: 0.006}


def test_a_step_that_has_not_ended_has_no_parts() -> None:
    assert parts([event for event in draw(DRAWINGS["nothing is known"]) if event.name != STEP]) is None
    assert parts([]) is None


def test_of_a_step_that_was_done_again_the_last_counts() -> None:
    before, after = "compute |ffffff..|", "compute |ff......|"
    found = parts(draw(before) + draw(after, begin_ms=500))
    assert found is not None
    assert (found.start_ns, found.compute) == (500 * MS, 0.002)


NAMES = {
    "compute": ["forward", "backward", "update", "clip"],
    "data": ["data"],
    "host": [*sorted(WAITS), "ledger", "forward", "save"],
    "communication": ["queued", "wait", "agree", "exchange", "send"],
    "replica 0": ["backward"],
}


@st.composite
def any_events(draw_from: Callable[..., int]) -> list[Event]:
    """Any events at all, also such that do not nest, in and around a window of 0 to 1000 ns."""
    kinds = [(lane, name) for lane, names in NAMES.items() for name in names]
    found = []
    for lane, name in draw_from(st.lists(st.sampled_from(kinds), max_size=25)):  # type: ignore[attr-defined]
        start = draw_from(st.integers(-50, 1050))
        end = start + draw_from(st.integers(0, 400))
        found.append(Event(0, lane, name, start, end, step=1, peer=draw_from(st.integers(-1, 2))))
    return [*found, Event(0, "host", STEP, 0, 1000, step=1)]


def all_ns(found: Parts) -> list[int]:
    figures = [found.compute, found.data, found.update, found.unattributed]
    return [ns(x) for x in [*figures, *found.exposed.values(), *found.waiting.values(), *found.host.values()]]


@given(any_events())
def test_no_part_is_negative_and_they_sum_to_the_wall_to_the_nanosecond(events: list[Event]) -> None:
    found = parts(events)
    assert found is not None
    assert min(all_ns(found)) >= 0
    assert sum(all_ns(found)) == 1000 == ns(found.wall)
    assert 0 <= ns(found.hidden) <= 1000 - ns(found.exposed_s) - ns(found.waiting_s)


@given(any_events())
def test_every_nanosecond_is_where_the_rule_puts_it(events: list[Event]) -> None:
    """The same parts, from asking of each nanosecond what covers it."""
    found = parts(events)
    assert found is not None
    device = any(event.lane == "host" and event.name in NAMES["compute"] and lasts(event) for event in events)
    tally = dict.fromkeys(("wait", "compute", "update", "data", "host", "nothing"), 0)
    for at in range(1000):
        tally[what(events, at, device)] += 1
    assert tally == {
        "wait": ns(found.exposed_s) + ns(found.waiting_s),
        "compute": ns(found.compute),
        "update": ns(found.update),
        "data": ns(found.data),
        "host": ns(found.host_s),
        "nothing": ns(found.unattributed),
    }


def lasts(event: Event) -> bool:
    return max(event.start_ns, 0) < min(event.end_ns, 1000)


def what(events: list[Event], at: int, device: bool) -> str:
    """What ``parts`` should say of one nanosecond."""
    here = [event for event in events if event.start_ns <= at < event.end_ns]
    work = [event for event in here if event.lane in ("compute", "data")]
    for wait in (event for event in here if event.lane == "host" and event.name in WAITS):
        lies_in = [event for event in work if spans(event, wait) and not (device and event.lane == "compute")]
        if len(lies_in) == len(work):
            return "wait"
    if any(event.lane == "compute" and event.name != "update" for event in work):
        return "compute"
    if work:
        return "update" if any(event.name == "update" for event in work) else "data"
    return "host" if any(event.lane == "host" and event.name != STEP for event in here) else "nothing"


def spans(outer: Event, inner: Event) -> bool:
    """Does ``inner`` lie in ``outer``, as far as the window goes?"""
    return max(outer.start_ns, 0) <= max(inner.start_ns, 0) and min(outer.end_ns, 1000) >= min(
        inner.end_ns, 1000
    )


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


def test_what_a_step_loses_has_a_lower_quartile_and_a_median() -> None:
    (one,) = steps(SHORT)
    waits = [{GRADIENT_SYNC: seconds} for seconds in (9, 1, 2, 4)]
    rows = [replace(one, step=i, exposed=wait, waiting={}) for i, wait in enumerate(waits)]
    found = breakdown(rows).losses
    assert found[GRADIENT_SYNC] == found[EXPOSED] == found[IDLE] == (1.75, 3.0)
    assert found[GRADIENT_SYNC].confidence == pytest.approx(1.75 / 3)
    assert found[DATA].confidence == 0.0  # nothing is lost
    assert breakdown(rows[:3]).losses == {}


def test_a_breakdown_travels_as_json() -> None:
    for found in (breakdown(steps(SHORT, LONG) * 3), breakdown(steps(SHORT), slowdown=0.25)):
        assert RankBreakdown.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": "0"}, "rank in a rank's breakdown"),
        ({"wall_s": None}, "wall_s in"),
        ({"hidden_s": float("nan")}, "hidden_s in"),
        ({"parts": [1.0]}, "parts in"),
        ({"causes": {"gradient sync": "<script>"}}, "causes in"),
        ({"losses": {"compute": [1.0]}}, "losses in"),
        ({"losses": {"compute": [1.0, "2"]}}, "losses in"),
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


BEGIN = 100  # ms, where draw begins


def said(found: list[Bubble]) -> list[tuple[int, int, str, int]]:
    """Begin and end in columns, cause and peer."""
    return [
        (bubble.start_ns // MS - BEGIN, bubble.end_ns // MS - BEGIN, bubble.cause, bubble.peer)
        for bubble in found
    ]


@pytest.mark.parametrize(
    ("drawing", "expected"),
    [
        (
            """
            compute         |ffbb........uu....|
            host            |....SSSSSSSS...LL.|
            communication 0 |...A.22XXX........|
            communication 1 |..........1X......|
            """,
            [
                (4, 5, GRADIENT_SYNC, -1),
                (5, 7, GRADIENT_SYNC, 2),
                (7, 10, GRADIENT_SYNC, -1),
                (10, 11, GRADIENT_SYNC, 1),
                (11, 12, GRADIENT_SYNC, -1),
                (15, 17, GLOBAL_LOSS, -1),
            ],
        ),
        (
            """
            host            |ff.PPP|
            compute         |.ffff.|
            """,
            [(5, 6, PARAMETER_UPDATE, 3)],
        ),
    ],
    ids=["two buckets", "a device"],
)
def test_bubbles_are_those_that_are_drawn(drawing: str, expected: list[tuple[int, int, str, int]]) -> None:
    assert said(bubbles(draw(drawing, peer=3))) == expected


@given(any_events())
def test_bubbles_are_disjoint_and_are_what_the_parts_say_of_waiting(events: list[Event]) -> None:
    found = bubbles(events)
    assert all(0 <= bubble.start_ns < bubble.end_ns <= 1000 for bubble in found)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(found))
    exposed: Counter[str] = Counter()
    waiting: Counter[int] = Counter()
    for bubble in found:
        if bubble.peer < 0:
            exposed[bubble.cause] += bubble.end_ns - bubble.start_ns
        else:
            waiting[bubble.peer] += bubble.end_ns - bubble.start_ns
    whole = parts(events)
    assert whole is not None
    assert {cause: round(seconds * 1e9) for cause, seconds in whole.exposed.items()} == exposed
    assert {peer: round(seconds * 1e9) for peer, seconds in whole.waiting.items()} == waiting


FAST = """
    compute         |ffffbbbbbbbb..........uu..|
    host            |............SSSSSSSSSS....|
    communication 0 |.....q11AXXXXX............|
    communication 1 |...........qqq111AXXX.....|
"""
SLOW = """
    compute         |.ffffffffbbbbbbbb.....uu..|
    host            |.................SSSSS....|
    communication 0 |.......qAXXXXX............|
    communication 1 |................qAXXX.....|
"""


def test_the_columns_of_a_drawn_step() -> None:
    first, second = bucket_rows([Timeline(draw(FAST, rank=0) + draw(SLOW, rank=1))])
    assert (first.bucket, first.bytes, first.steps) == (0, 1000, 1)
    assert first.ready_ms == {0: 5, 1: 7}
    assert (first.skew_ms, first.slowest) == (2, 1)
    assert first.wait_ms == 1  # 2 and none
    assert (first.flight_ms, first.agree_ms, first.exchange_ms) == (6, 1, 5)
    assert (first.exposed_ms, first.hidden_ms) == (1, 5)  # 2 of 6 on rank 0, none on rank 1
    assert second.ready_ms == {0: 11, 1: 16}
    assert (second.skew_ms, second.slowest, second.wait_ms) == (5, 1, 1.5)
    assert (second.flight_ms, second.exposed_ms, second.hidden_ms) == (4, 4, 0)


def test_figures_are_medians_over_steps() -> None:
    steps = [
        Timeline(draw(FAST, rank=0, step=step) + draw(SLOW, rank=1, step=step, begin_ms=100 + late))
        for step, late in enumerate([0, 1, 9, 2, -4])
    ]
    random.Random(1).shuffle(steps)
    row = bucket_rows(steps)[0]
    assert row.steps == 5
    # after rank 0's begin rank 1 is ready at 7 + late; where it begins 4 ms earlier, all counts from there
    assert row.ready_ms == {0: 5, 1: 8}
    assert row.skew_ms == 3  # of 2, 3, 11, 4, 2
    assert row.slowest == 1


def test_steps_from_before_the_size_of_buckets_was_chosen_are_left_out() -> None:
    found = [draw(FAST, rank=0, step=step) for step in range(5)]
    for step in range(3):  # one bucket more, and all of them of other sizes
        found[step] = [x._replace(bytes=x.bytes // 2) for x in found[step]]
        found[step] += [x._replace(bucket=7, bytes=500) for x in found[step] if x.bucket == 1]
    rows = bucket_rows(map(Timeline, found))
    assert [(row.bucket, row.bytes, row.steps) for row in rows] == [(0, 1000, 2), (1, 1000, 2)]


@pytest.mark.parametrize(
    "events", [[], draw("host |ll|"), draw(FAST)[:-1]], ids=["none", "alone", "not ended"]
)
def test_without_buckets_there_are_no_rows(events: list[Event]) -> None:
    assert bucket_rows([Timeline(events)]) == []
