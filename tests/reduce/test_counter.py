"""Leaves that arrive one by one are added in the order of the tree, in few buffers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.reduce.buckets import TreeAccumulator
from instep.reduce.node_format import NodeFormat, Stretch
from tests.reduce.trees import maximal_nodes, rounded, tree_sum

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


def test_a_fresh_step_forgets_the_one_before():
    memory = Memory()
    counter = TreeAccumulator(memory.home, memory.spare)
    push_all(counter, {0: torch.full((NUM_ELEMENTS,), 7.0), 1: torch.ones(NUM_ELEMENTS)}, 2)
    push_all(counter, {0: torch.ones(NUM_ELEMENTS)}, 2)
    assert [(node, value.tolist()) for node, value in counter.roots] == [((0, 1), [1.0] * NUM_ELEMENTS)]
