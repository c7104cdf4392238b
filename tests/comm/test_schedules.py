"""Schedules as lists of steps: played on letters, and their costs beside those of the textbook."""

from __future__ import annotations

import math
from itertools import pairwise
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.algorithms import SCHEDULES
from instep.comm.binomial_tree import children, parent, subtree
from instep.comm.cost import collective_cost
from instep.comm.play import Played, play
from instep.comm.schedule import edges, receive, send

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


@given(st.integers(0, 10**12), st.integers(1, 1000))
def test_chunks_cover_all_elements_and_differ_by_one_at_most(num_elements, parts):
    found = edges(num_elements, parts)
    lengths = [hi - lo for lo, hi in pairwise(found)]
    assert (len(lengths), found[0], found[-1]) == (parts, 0, num_elements)
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 300))
def test_every_rank_is_once_below_the_root_and_a_subtree_is_a_range(size):
    below = [child for v in range(size) for child in children(v, size)]
    assert sorted(below) == list(range(1, size))
    for v in range(size):
        assert all(parent(child) == v for child in children(v, size))
        own = [v, *(node for child in reversed(children(v, size)) for node in subtree(child, size))]
        assert own == list(subtree(v, size))


def closed_forms(W: int, S: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Steps and bytes of the longest chain: Thakur, Rabenseifner, Gropp 2005, by the letter."""
    L, P = math.ceil(math.log2(W)), 1 << (W.bit_length() - 1)
    log = int(math.log2(P))
    extra = 2 if P < W else 0  # ranks beyond a power of two: one message to a neighbour, one back
    parts = S * (W - 1) // W
    halves = S * (P - 1) // P
    return {
        ("all_reduce", "naive"): (2 * (W - 1), 2 * (W - 1) * S),
        ("all_reduce", "reduce_broadcast"): (2 * L, 2 * L * S),
        ("all_reduce", "ring"): (2 * (W - 1), 2 * parts),
        ("all_reduce", "direct"): (2 * (W - 1), 2 * parts),
        ("all_reduce", "recursive_doubling"): (log + extra, (log + extra) * S),
        ("all_reduce", "halving_doubling"): (2 * log + extra, 2 * halves + extra * S),
        ("broadcast", "naive"): (W - 1, (W - 1) * S),
        ("broadcast", "tree"): (L, L * S),
        ("broadcast", "scatter_allgather"): (L + W - 1, 2 * parts),
        ("reduce", "naive"): (W - 1, (W - 1) * S),
        ("reduce", "tree"): (L, L * S),
        **{
            (kind, name): (W - 1, parts)
            for kind in ("reduce_scatter", "all_gather")
            for name in ("ring", "direct")
        },
        ("all_to_all", "direct"): (W - 1, parts),
        ("scatter", "naive"): (W - 1, parts),
        ("gather", "naive"): (W - 1, parts),
    }


@pytest.mark.parametrize("W", [*range(1, 10), 12, 16, 32])
def test_costs_are_those_of_the_textbook(W):
    num_elements = W * 32 * 3  # the butterfly cuts into powers of two
    forms = closed_forms(W, 4 * num_elements)
    assert forms.keys() == {(kind, name) for kind, names in SCHEDULES.items() for name in names}
    for (kind, name), (steps, path_bytes) in forms.items():
        found = collective_cost(SCHEDULES[kind][name], W, num_elements, itemsize=4)
        assert max(found.sent) <= found.path_bytes and max(found.messages) <= found.steps, name
        if name == "scatter_allgather" and W & (W - 1):  # the ring begins while the tree ends
            assert found.steps <= steps, W
        else:
            assert (found.steps, found.path_bytes) == (steps, path_bytes), (kind, name)
