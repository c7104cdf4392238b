"""The table of buckets, from drawn steps of two or three ranks."""

import random

import pytest

from instep.events import Event, Timeline
from instep.timeline.bucket_times import bucket_rows
from tests.timeline.drawings import draw

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


def test_weights_that_are_gathered_are_no_bucket() -> None:
    with_gather = (
        FAST + "    communication 0 |GGG..................|\n    communication 7 |GGG..................|\n"
    )
    assert bucket_rows([Timeline(draw(with_gather))]) == bucket_rows([Timeline(draw(FAST))])


def test_ready_counts_from_the_earliest_begin_on_the_common_clock() -> None:
    steps = [Timeline(draw(FAST, rank=0) + draw(SLOW, rank=1, begin_ms=103))]
    row = bucket_rows(steps)[0]
    assert row.ready_ms == {0: 5, 1: 10}
    assert row.skew_ms == 5


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


def test_slowest_is_who_is_most_often_last() -> None:
    steps = [
        Timeline(
            draw(FAST, rank=0, step=step)
            + draw(FAST, rank=1, step=step, begin_ms=100 + late)
            + draw(FAST, rank=2, step=step, begin_ms=101)
        )
        for step, late in enumerate([0, 0, 30])
    ]
    assert bucket_rows(steps)[0].slowest == 2


def test_a_server_sends_and_receives_instead() -> None:
    worker = """
        compute         |ffbb.....|
        host            |....PPPPP|
        communication 0 |...qX>+<.|
    """
    row = bucket_rows([Timeline(draw(worker, rank=1, peer=0))])[0]
    assert (row.flight_ms, row.agree_ms, row.exchange_ms, row.exposed_ms) == (4, 0, 4, 4)
    assert (row.slowest, row.skew_ms, row.bytes) == (-1, 0, 1000)


def test_of_a_step_that_was_done_again_the_last_counts() -> None:
    events = draw(FAST.replace("AXXXXX", "AXXX.."), rank=0) + draw(FAST, rank=0, begin_ms=500)
    assert bucket_rows([Timeline(events)])[0].flight_ms == 6


@pytest.mark.parametrize(
    "events", [[], draw("host |ll|"), draw(FAST)[:-1]], ids=["none", "alone", "not ended"]
)
def test_without_buckets_there_are_no_rows(events: list[Event]) -> None:
    assert bucket_rows([Timeline(events)]) == []
