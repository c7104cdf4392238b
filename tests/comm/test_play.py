"""Every schedule, played on letters: the right sum is on the right ranks, for the rounds of its formula."""

from __future__ import annotations

from string import ascii_lowercase

import pytest

from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import FORMULAS
from instep.comm.play import MAX_RANKS, Played, play
from instep.comm.schedule import WHOLE, exchange, receive, send

SIZES = range(1, 10)
EVERY = [(collective, name) for collective, schedules in SCHEDULES.items() for name in schedules]
ADDS = {"all_reduce", "reduce", "reduce_scatter"}


def at_the_end(played: Played) -> list[list[str]]:
    """Who holds what after the last round."""
    return [played.start, *(held for _, held in played.rounds())][-1]


def where_the_result_is(collective: str, rank: int, num_parts: int, size: int) -> range:
    """The parts of x that count on ``rank`` when all is done."""
    if collective == "reduce" and rank:
        return range(0)
    return range(rank, rank + 1) if collective == "reduce_scatter" and size > 1 else range(num_parts)


def result(collective: str, part: int, size: int) -> str:
    """The letters of part ``part``, in alphabetical order."""
    everybody = ascii_lowercase[:size]
    return everybody if collective in ADDS else everybody[part] if collective == "all_gather" else "a"


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_addend_is_in_every_sum_once(collective, name):
    for size in SIZES:
        played = play(collective, SCHEDULES[collective][name], size)
        held = at_the_end(played)
        for rank in range(size):
            for part in where_the_result_is(collective, rank, played.num_parts, size):
                assert "".join(sorted(held[rank][part])) == result(collective, part, size)


@pytest.mark.parametrize("name", SCHEDULES["all_reduce"])
def test_all_ranks_have_added_in_one_order(name):
    """So they have the same bits."""
    for size in SIZES:
        held = at_the_end(play("all_reduce", SCHEDULES["all_reduce"][name], size))
        assert held == [held[0]] * size


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_what_is_sent_is_what_the_formula_says(collective, name):
    for size in SIZES:
        played = play(collective, SCHEDULES[collective][name], size)
        formula = FORMULAS[collective][name](size, played.num_parts, 1)
        assert tuple(played.parts_sent(rank) for rank in range(size)) == formula.sent
        assert [sum(m.sender == rank for m in played.messages) for rank in range(size)] == list(
            formula.messages
        )
        if name == "scatter_allgather":  # the ring begins while the tree ends
            assert played.num_rounds <= formula.steps
        else:
            assert played.num_rounds == formula.steps


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_rank_sends_one_message_in_a_round_and_receives_one(collective, name):
    for messages, _ in play(collective, SCHEDULES[collective][name], 6).rounds():
        for ends in ([message.sender for message in messages], [message.receiver for message in messages]):
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
