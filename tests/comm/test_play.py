"""Every schedule, played on letters: the right sum is on the right ranks."""

from __future__ import annotations

from string import ascii_lowercase

import pytest

from instep.comm.algorithms import SCHEDULES
from instep.comm.play import MAX_RANKS, Played, play
from instep.comm.schedule import WHOLE, exchange, receive, send

SIZES = range(1, 10)
EVERY = [(collective, name) for collective, schedules in SCHEDULES.items() for name in schedules]


def at_the_end(played: Played) -> list[list[str]]:
    """Who holds what after the last round."""
    return [played.start, *(held for _, held in played.rounds())][-1]


def result(collective: str, rank: int, num_parts: int, size: int) -> dict[int, str]:
    """The letters of the parts that count on ``rank``, in alphabetical order."""
    everybody = ascii_lowercase[:size]
    own = [rank] if num_parts > 1 else [0]
    match collective:
        case "reduce" | "gather" if rank:
            return {}
        case "reduce_scatter":
            return dict.fromkeys(own, everybody)
        case "scatter":
            return dict.fromkeys(own, "a")
        case "broadcast":
            return dict.fromkeys(range(num_parts), "a")
        case "all_gather" | "gather" | "all_to_all":
            return dict(enumerate(everybody))
        case _:
            return dict.fromkeys(range(num_parts), everybody)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_addend_is_in_every_sum_once_and_a_rank_does_one_thing_at_a_time(collective, name):
    for size in SIZES:
        played = play(collective, SCHEDULES[collective][name], size)
        held = at_the_end(played)
        for rank in range(size):
            expected = result(collective, rank, played.num_parts, size)
            assert {part: "".join(sorted(held[rank][part])) for part in expected} == expected
        if collective == "all_reduce":  # in one order: so all ranks have the same bits
            assert held == [held[0]] * size
        for messages, _ in played.rounds():
            for ends in ([one.sender for one in messages], [one.receiver for one in messages]):
                assert len(ends) == len(set(ends))


def test_a_ring_of_three_is_the_one_that_is_drawn_beside_it():
    """In ``comm/ring.py``: after step 1 part 1 of rank 0 is c1 + a1, after step 2 rank j has part j."""
    rounds = play("all_reduce", SCHEDULES["all_reduce"]["ring"], 3).rounds()
    _, first = next(rounds)
    assert first == [["a", "ca", "a"], ["b", "b", "ab"], ["bc", "c", "c"]]
    sent, second = next(rounds)
    assert [(message.sender, message.receiver, message.piece.first) for message in sent] == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 0, 0),
    ]
    assert [second[rank][rank] for rank in range(3)] == ["bca", "cab", "abc"]


def test_ranks_that_wait_for_each_other_are_named():
    def both_receive_first(rank: int, size: int):
        yield receive(1 - rank)
        yield send(1 - rank)

    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for messages that no rank sends"):
        play("broadcast", both_receive_first, 2)


def test_a_message_has_what_was_there_when_its_step_began():
    """Two ranks that exchange their letters hold the other's, not twice the first one's."""

    def swap(rank: int, size: int):
        yield exchange(1 - rank, WHOLE, 1 - rank, WHOLE)

    assert at_the_end(play("reduce", swap, 2)) == [["b"], ["a"]]


def test_there_are_as_many_ranks_as_letters():
    with pytest.raises(ValueError, match=f"expected 1 to {MAX_RANKS} ranks, got 27"):
        play("broadcast", SCHEDULES["broadcast"]["tree"], 27)
