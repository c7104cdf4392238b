"""Cuts, the binomial tree, and the formulas of the cost: arithmetic, checked against other arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm import cost
from instep.comm.binomial_tree import children, depth, parent, subtree
from instep.comm.cost import CollectiveCost
from instep.comm.messages import edges, lengths


@given(st.integers(0, 10**12), st.integers(1, 1000))
def test_chunks_cover_all_elements_and_differ_by_one_at_most(num_elements, parts):
    found = lengths(num_elements, parts)
    assert len(found) == parts and sum(found) == num_elements
    assert max(found) - min(found) <= 1
    assert edges(num_elements, parts)[0] == 0


@given(st.integers(1, 300))
def test_everybody_hangs_below_the_root_of_the_binomial_tree_exactly_once(size):
    below = [child for v in range(size) for child in children(v, size)]
    assert sorted(below) == list(range(1, size))
    assert all(parent(child) == v for v in range(size) for child in children(v, size))


@given(st.integers(1, 300))
def test_a_subtree_is_a_node_and_the_subtrees_of_its_children(size):
    for v in range(size):
        own = [v, *(node for child in reversed(children(v, size)) for node in subtree(child, size))]
        assert own == list(subtree(v, size))


@given(st.integers(1, 300))
def test_the_tree_is_served_in_log2_steps(size):
    served = {0: 0}
    for v in range(size):  # a parent has a lower number
        for k, child in enumerate(children(v, size)):
            served[child] = served[v] + k + 1
    assert max(served.values()) == depth(size) == math.ceil(math.log2(size))


W_AND_S = [(2, 1 << 12), (4, 1 << 12), (8, 1 << 12), (64, 1 << 20)]


@pytest.mark.parametrize(("W", "S"), W_AND_S)
def test_costs_at_powers_of_two_are_those_of_the_textbook(W, S):
    """Thakur, Rabenseifner, Gropp 2005, by the letter."""
    log = int(math.log2(W))
    expected = {
        "naive": (2 * (W - 1), 2 * (W - 1) * S),
        "reduce_broadcast": (2 * log, 2 * log * S),
        "ring": (2 * (W - 1), 2 * S * (W - 1) // W),
        "direct": (2 * (W - 1), 2 * S * (W - 1) // W),
        "recursive_doubling": (log, log * S),
        "halving_doubling": (2 * log, 2 * S * (W - 1) // W),
    }
    assert expected.keys() == cost.ALL_REDUCE.keys()
    for name, (steps, path_bytes) in expected.items():
        found = cost.all_reduce(name, W, S, itemsize=4)
        assert (found.steps, found.path_bytes) == (steps, path_bytes), name


@pytest.mark.parametrize(("W", "S"), W_AND_S)
def test_a_broadcast_in_parts_has_the_bytes_of_the_textbook(W, S):
    found = cost.broadcast("scatter_allgather", W, S)
    assert found.steps == math.log2(W) + W - 1
    assert found.path_bytes == 2 * S * (W - 1) // W


@pytest.mark.parametrize("W", [3, 5, 6, 7, 12])
def test_ranks_beyond_a_power_of_two_cost_two_messages_of_all_bytes(W):
    S, P = 1 << 12, 1 << (W.bit_length() - 1)
    for name in ("recursive_doubling", "halving_doubling"):
        found, power = cost.all_reduce(name, W, S), cost.all_reduce(name, P, S)
        assert (found.steps, found.path_bytes) == (power.steps + 2, power.path_bytes + 2 * S)


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("num_elements", [0, 1, 5, 64])
def test_no_all_reduce_sends_fewer_bytes_in_all_than_each_rank_has_to(W, num_elements):
    """All but one rank's addend have to leave, and all but one rank have to learn the sum."""
    for name in cost.ALL_REDUCE:
        found = cost.all_reduce(name, W, 4 * num_elements, itemsize=4)
        assert sum(found.sent) >= 2 * (W - 1) * 4 * num_elements, name
        assert found.bytes_sent <= found.path_bytes, name
        assert found.num_messages <= found.steps, name


def test_a_world_of_one_and_an_empty_tensor_cost_nothing():
    for name in cost.ALL_REDUCE:
        assert cost.all_reduce(name, 1, 1 << 10).time_s(1.0, 1.0) == 0
        assert cost.all_reduce(name, 5, 0).time_s(1.0, 1.0) == 0


def test_a_ring_over_four_ranks_takes_the_time_that_is_worked_out_by_hand():
    found = cost.all_reduce("ring", 4, 1 << 20, itemsize=4)
    assert found.time_s(20e-6, 1e-9) == pytest.approx(6 * 20e-6 + 1.5 * (1 << 20) * 1e-9)
    assert found.sent == (3 << 19,) * 4 and found.messages == (6,) * 4


def test_one_cost_after_another_is_their_sum():
    assert CollectiveCost(1, 2, (3, 0), (1, 0)) + CollectiveCost(1, 5, (0, 5), (0, 1)) == CollectiveCost(
        2, 7, (3, 5), (1, 1)
    )


def test_unknown_names_and_cut_elements_are_refused():
    with pytest.raises(ValueError, match="expected an algorithm of naive, tree, got 'ring'"):
        cost.reduce("ring", 2, 8)
    with pytest.raises(ValueError, match="expected whole elements, got 7 bytes of 4 bytes each"):
        cost.all_reduce("ring", 2, 7, itemsize=4)
