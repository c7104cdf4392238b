"""Turns, and what is read off a contestant after each of its steps."""

from collections import Counter

from instep.bench.rounds import busy_s, order, traffic
from instep.events import Event

NAMES = ["a", "b", "c", "d"]


def span(start, end, name="exchange", lane="communication"):
    return Event(0, lane, name, start * 10**9, end * 10**9)


def test_everybody_begins_and_ends_equally_often():
    rounds = [order(NAMES, number) for number in range(2 * len(NAMES))]
    assert (
        Counter(names[0] for names in rounds)
        == Counter(names[-1] for names in rounds)
        == dict.fromkeys(NAMES, 2)
    )


def test_nobody_always_follows_the_same_one():
    before = {
        names[names.index("b") - 1] for number in range(8) if (names := order(NAMES, number)).index("b") > 0
    }
    assert before == {"a", "c"}


def test_a_lane_is_busy_for_the_union_of_its_spans():
    assert busy_s([span(0, 2), span(1, 3), span(5, 6), span(5, 6)]) == 4


def test_waiting_and_other_lanes_are_not_busy():
    assert busy_s([span(0, 9, "queued"), span(0, 9, "wait"), span(0, 9, lane="compute"), span(3, 4)]) == 1


def test_a_contestant_without_spans_is_not_busy():
    assert busy_s([]) == 0


def test_traffic_is_read_from_the_link_and_no_other_interface(tmp_path):
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                    |  Transmit\n"
        " face |bytes    packets errs drop ... |bytes    packets errs drop ...\n"
        "    lo:   11   1 0 0 0 0 0 0   12   1 0 0 0 0 0 0\n"
        "  eth0: 7000   9 0 0 0 0 0 0 5000   8 0 0 0 0 0 0\n"
    )
    assert traffic(table) == (5000, 7000)
    assert traffic(table, "eth1") == (0, 0)
