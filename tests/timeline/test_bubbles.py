"""Bubbles: the stretches of waiting, with their causes, drawn."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC, PARAMETER_UPDATE, Event
from instep.timeline.breakdown import parts
from instep.timeline.bubbles import Bubble, bubbles
from tests.timeline.drawings import MS, draw
from tests.timeline.test_breakdown import any_events

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
            "compute |ffbb|",
            [],
        ),
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
            host            |SSSSSSSSSS|
            host            |...LLL....|
            """,
            [(0, 3, GRADIENT_SYNC, -1), (3, 6, GLOBAL_LOSS, -1), (6, 10, GRADIENT_SYNC, -1)],
        ),
        (
            """
            compute         |bbbbbbbbbb|
            host            |...SSSSSS.|
            compute         |....cc....|
            """,
            [(3, 4, GRADIENT_SYNC, -1), (6, 9, GRADIENT_SYNC, -1)],
        ),
        (
            """
            host            |ff.PPP|
            compute         |.ffff.|
            """,
            [(5, 6, PARAMETER_UPDATE, 3)],
        ),
    ],
    ids=["none", "two buckets", "in each other", "inside backward, with work inside", "a device"],
)
def test_bubbles_are_those_that_are_drawn(drawing: str, expected: list[tuple[int, int, str, int]]) -> None:
    assert said(bubbles(draw(drawing, peer=3))) == expected


def test_a_step_that_has_not_ended_has_no_bubbles() -> None:
    assert bubbles(draw("host |SSSS|")[:-1]) == []


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
