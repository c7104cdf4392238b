"""Cuts, the binomial tree, and costs counted from steps: arithmetic, checked against other arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.algorithms import SCHEDULES
from instep.comm.binomial_tree import children, parent, subtree
from instep.comm.cost import collective_cost
from instep.comm.schedule import edges
from tests.comm.inputs import NUM_ELEMENTS


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


@pytest.mark.parametrize("W", range(1, 9))
def test_no_all_reduce_sends_fewer_bytes_in_all_than_each_rank_has_to(W):
    """All but one rank's addend have to leave, and all but one rank have to learn the sum."""
    for name, schedule in SCHEDULES["all_reduce"].items():
        for num_elements in NUM_ELEMENTS:
            found = collective_cost(schedule, W, num_elements, itemsize=4)
            assert sum(found.sent) >= 2 * (W - 1) * 4 * num_elements, name
            assert (W > 1 and num_elements) or found.time_s(1.0, 1.0) == 0


def test_a_ring_over_four_ranks_takes_the_time_that_is_worked_out_by_hand():
    found = collective_cost(SCHEDULES["all_reduce"]["ring"], 4, 1 << 18, itemsize=4)
    assert found.time_s(20e-6, 1e-9) == pytest.approx(6 * 20e-6 + 1.5 * (1 << 20) * 1e-9)
    assert found.sent == (3 << 19,) * 4 and found.messages == (6,) * 4
