"""The order of the sum is the tree's, whoever holds the leaves; plans move as few roots as can be."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.reduce.buckets import TreeAccumulator
from instep.reduce.node_format import NodeFormat, Stretch
from instep.reduce.tree import are_siblings, host_major, rank_major, roots, round_major, sum_of
from tests.reduce.trees import children, maximal_nodes, parenthesised, rounded, tree_sum


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8, 11, 16])
def test_siblings_are_the_two_children_of_one_node(num_leaves):
    expected = set(children(num_leaves).values())
    ranges = list(combinations(range(num_leaves + 1), 2))
    assert {(a, b) for a in ranges for b in ranges if are_siblings(a, b, num_leaves)} == expected


@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_roots_are_the_maximal_nodes_that_a_rank_has_alone(num_leaves, data):
    leaves = data.draw(st.sets(st.integers(0, num_leaves - 1)))
    arrival = data.draw(st.permutations(sorted(leaves)))
    assert roots(arrival, num_leaves) == maximal_nodes(leaves, num_leaves)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """G, and which rank has which leaves: contiguous, by turns, or anyhow; some ranks may have none."""
    num_leaves, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["contiguous", "round-major", "rank-major", "anyhow"]))
    if kind == "round-major":
        return num_leaves, round_major(num_leaves, num_ranks)
    if kind == "rank-major":
        return num_leaves, [list(leaves) for leaves in rank_major(num_leaves, num_ranks)]
    if kind == "contiguous":
        some = st.lists(st.integers(0, num_leaves), min_size=num_ranks - 1, max_size=num_ranks - 1)
        edges = [0, *sorted(draw(some)), num_leaves]
        return num_leaves, [list(range(lo, hi)) for lo, hi in pairwise(edges)]
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_leaves, max_size=num_leaves))
    return num_leaves, [[i for i, own in enumerate(owners) if own == r] for r in range(num_ranks)]


@given(placements(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_every_placement_and_every_arrival_gives_one_expression(placement, random):
    num_leaves, ranks = placement
    names = [f"g{leaf}" for leaf in range(num_leaves)]
    nodes = [node for leaves in ranks for node in roots(leaves, num_leaves)]
    random.shuffle(nodes)
    values = [tree_sum(names[lo:hi], parenthesised) for lo, hi in nodes]
    for left, right in sum_of(nodes, (), num_leaves).adds:
        values[left] = parenthesised(values[left], values[right])
    assert values[nodes.index(min(nodes))] == tree_sum(names, parenthesised)


@pytest.mark.parametrize(
    "nodes",
    [[], [(0, 4)], [(0, 4), (4, 5), (4, 5)], [(0, 2), (1, 2), (2, 4), (4, 5)], [(1, 3), (0, 1), (3, 5)]],
    ids=["none", "one missing", "one twice", "overlapping", "no nodes of the tree"],
)
def test_nodes_that_do_not_cover_the_leaves_once_are_refused(nodes):
    with pytest.raises(ValueError, match="do not cover the 5 leaves of the tree once each"):
        sum_of(nodes, (), 5)


@given(st.integers(1, 300), st.integers(1, 64))
@settings(deadline=None)
def test_round_major_deals_the_leaves_in_turn(num_leaves, num_ranks):
    dealt = round_major(num_leaves, num_ranks)
    assert len(dealt) == num_ranks
    for leaf in range(num_leaves):
        assert dealt[leaf % num_ranks][leaf // num_ranks] == leaf
    assert sum(map(len, dealt)) == num_leaves


@given(st.integers(1, 300), st.integers(1, 64))
@settings(deadline=None)
def test_rank_major_deals_every_leaf_once_in_ranges_without_overload(num_leaves, num_ranks):
    ranges = rank_major(num_leaves, num_ranks)
    assert len(ranges) == num_ranks
    assert [leaf for leaves in ranges for leaf in leaves] == list(range(num_leaves))
    assert max(map(len, ranges)) == math.ceil(num_leaves / num_ranks)
    assert sum(len(leaves) > 0 for leaves in ranges) == min(num_leaves, num_ranks)


def cost(edges: tuple[int, ...], num_leaves: int) -> tuple[int, int]:
    """The largest number of roots on a rank, and the number of all."""
    counts = [len(maximal_nodes(set(range(lo, hi)), num_leaves)) for lo, hi in pairwise(edges)]
    return max(counts), sum(counts)


SMALL = [(num_leaves, num_ranks) for num_leaves in (1, 5, 8, 10, 12, 13) for num_ranks in range(1, 6)]


# The last three are the smallest where the fewest roots in total are not the fewest on the busiest rank.
@pytest.mark.parametrize(("num_leaves", "num_ranks"), [*SMALL, (41, 4), (51, 4), (73, 4)])
def test_rank_major_has_the_fewest_roots_of_all_cuts(num_leaves, num_ranks):
    busy = min(num_leaves, num_ranks)
    load = math.ceil(num_leaves / num_ranks)
    cuts = [(0, *inner, num_leaves) for inner in combinations(range(1, num_leaves), busy - 1)]
    allowed = [cut for cut in cuts if all(hi - lo <= load for lo, hi in pairwise(cut))]
    fewest = min(cost(cut, num_leaves) for cut in allowed)
    longest_first = max(cut for cut in allowed if cost(cut, num_leaves) == fewest)
    found = rank_major(num_leaves, num_ranks)[:busy]
    assert (0, *(leaves.stop for leaves in found)) == longest_first


@pytest.mark.parametrize(("num_leaves", "num_ranks"), [(1024, 64), (1024, 63), (1000, 45), (769, 64)])
def test_a_large_plan_covers_its_leaves(num_leaves, num_ranks):
    """Also ends before the deadline of a test, which a search of all cuts would not."""
    host_major.cache_clear()
    ranges = rank_major(num_leaves, num_ranks)
    sum_of([node for leaves in ranges for node in roots(leaves, num_leaves)], (), num_leaves)
    assert max(map(len, ranges)) == math.ceil(num_leaves / num_ranks)


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 6))
@settings(deadline=None)
def test_host_major_loads_no_rank_more_and_leaves_no_more_roots_on_a_host(num_leaves, num_hosts, num_local):
    ranges = host_major(num_leaves, num_hosts, num_local)
    by_rank = rank_major(num_leaves, num_hosts * num_local)
    assert [leaf for leaves in ranges for leaf in leaves] == list(range(num_leaves))
    assert len(ranges) == len(by_rank) and max(map(len, ranges)) == max(map(len, by_rank))
    assert most_roots(ranges, num_local, num_leaves) <= most_roots(by_rank, num_local, num_leaves)


def most_roots(by_rank: tuple[range, ...], num_local: int, num_leaves: int) -> int:
    """The largest number of roots on a host."""
    starts = range(0, len(by_rank), num_local)
    hosts = [[leaf for own in by_rank[i : i + num_local] for leaf in own] for i in starts]
    return max(len(roots(own, num_leaves)) for own in hosts)


@pytest.mark.parametrize("num_leaves", [8, 16, 32])
def test_two_hosts_of_three_ranks_have_one_root_each(num_leaves):
    assert most_roots(host_major(num_leaves, 2, 3), 3, num_leaves) == 1
    assert most_roots(rank_major(num_leaves, 6), 3, num_leaves) > 1


@pytest.mark.parametrize(("num_leaves", "num_ranks"), [(0, 1), (1, 0), (-3, 2)])
def test_there_must_be_a_leaf_and_a_rank(num_leaves, num_ranks):
    with pytest.raises(ValueError, match="at least one leaf and one rank"):
        rank_major(num_leaves, num_ranks)


NUM_ELEMENTS = 5


class Memory:
    """Counts the buffers of a counter."""

    def __init__(self) -> None:
        self.home = torch.empty(NUM_ELEMENTS)
        self.num_buffers = 1

    def spare(self) -> Tensor:
        self.num_buffers += 1
        return torch.empty(NUM_ELEMENTS)


def push_all(
    counter: TreeAccumulator, leaves: dict[int, Tensor], num_leaves: int, *, adds: bool = False
) -> None:
    """``adds``: a leaf is accumulated into its sibling, if there is one."""
    counter.reset(num_leaves)
    for leaf, gradient in leaves.items():
        if adds and (sibling := counter.sibling_of(leaf)) is not None:
            sibling.add_(gradient)
            counter.added(leaf)
            continue
        buffer = counter.open()
        buffer.copy_(gradient)
        counter.push(leaf, buffer)


def drawn(num_leaves: int, seed: int) -> np.ndarray:
    """Leaves whose sum depends on its order: magnitudes from 1e-3 to 1e3."""
    random = np.random.default_rng(seed)
    exponents = random.uniform(-3, 3, (num_leaves, NUM_ELEMENTS))
    return (random.standard_normal((num_leaves, NUM_ELEMENTS)) * 10**exponents).astype(np.float32)


@given(st.integers(1, 24), st.data(), st.integers(0, 1000), st.booleans(), st.booleans())
@settings(deadline=None)
def test_partial_sums_have_the_bits_of_the_tree_in_any_order_of_arrival(
    num_leaves, data, seed, adds, shuffled
):
    own = sorted(data.draw(st.sets(st.integers(0, num_leaves - 1), min_size=1)))
    own = data.draw(st.permutations(own)) if shuffled else own
    gradients, memory = drawn(num_leaves, seed), Memory()
    counter = TreeAccumulator(memory.home, memory.spare)
    push_all(counter, {leaf: torch.from_numpy(gradients[leaf]) for leaf in own}, num_leaves, adds=adds)
    assert [node for node, _ in counter.roots] == maximal_nodes(set(own), num_leaves)
    for (lo, hi), value in counter.roots:
        assert value.numpy().tobytes() == tree_sum(gradients[lo:hi], rounded).tobytes()
    assert counter.roots[0][1] is memory.home


@pytest.mark.parametrize("adds", [False, True])
def test_a_whole_tree_needs_log2_plus_one_buffers_and_one_less_if_leaves_are_added(adds):
    for num_leaves in range(1, 40):
        memory = Memory()
        gradients = {leaf: torch.zeros(NUM_ELEMENTS) for leaf in range(num_leaves)}
        push_all(TreeAccumulator(memory.home, memory.spare), gradients, num_leaves, adds=adds)
        assert memory.num_buffers == max(1, math.floor(math.log2(num_leaves)) + (not adds))


def test_a_leaf_is_not_accumulated_into_rounded_nodes():
    memory = Memory()
    nodes = NodeFormat("bfloat16").of_bucket([Stretch(0, 0, 16)], 16, 1, torch.float32, torch.device("cpu"))
    counter = TreeAccumulator(torch.empty(16), memory.spare, nodes=nodes)
    counter.reset(2)
    counter.push(0, counter.open().zero_())
    assert counter.sibling_of(1) is None


def test_a_later_step_allocates_nothing_even_after_an_abandoned_one():
    memory = Memory()
    counter = TreeAccumulator(memory.home, memory.spare)
    gradients = {leaf: torch.ones(NUM_ELEMENTS) for leaf in range(1, 7)}
    push_all(counter, gradients, 8)
    needed = memory.num_buffers
    for given_up_after in (1, 2, 4):
        push_all(counter, {leaf: gradients[leaf] for leaf in range(1, 1 + given_up_after)}, 8)
        counter.open()  # a leaf whose backward raises is never pushed
        push_all(counter, gradients, 8)
        assert memory.num_buffers == needed
    assert [value.tolist() for _, value in counter.roots] == [[n] * NUM_ELEMENTS for n in (1, 2, 2, 1)]
