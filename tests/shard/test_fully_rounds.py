"""Rounds: what the owner of a slice adds when, by arithmetic alone; and the memory that it takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from instep.shard.round_plan import plan_rounds
from tests.parity import filled, numbers
from tests.world import world


def of_tree(lo: int, hi: int) -> str:
    """The sum over leaves lo to hi, in brackets, by the definition of the tree."""
    if hi - lo == 1:
        return str(lo)
    half = 2 ** (math.ceil(math.log2(hi - lo)) - 1)
    return f"({of_tree(lo, lo + half)} {of_tree(lo + half, hi)})"


def of_rounds(num_leaves: int, num_ranks: int) -> str:
    kept: list[str] = []
    leaves = iter(range(num_leaves))
    for turn in plan_rounds(num_leaves, num_ranks):
        values = kept + [str(next(leaves)) for _ in turn.senders]
        for plan in turn.sums:
            for left, right in plan.adds:
                values[left] = f"({values[left]} {values[right]})"
        kept = [values[plan.root] for plan in turn.sums]
    (root,) = kept
    assert next(leaves, None) is None
    return root


@given(st.integers(1, 70), st.integers(1, 9))
def test_rounds_add_in_the_order_of_the_tree(num_leaves: int, num_ranks: int) -> None:
    assert of_rounds(num_leaves, num_ranks) == of_tree(0, num_leaves)
    assert len(plan_rounds(num_leaves, num_ranks)) == math.ceil(num_leaves / num_ranks)


@given(st.integers(0, 7), st.integers(0, 4))
def test_powers_of_two_keep_as_many_sums_as_a_binary_counter_has_digits(leaves: int, ranks: int) -> None:
    digits = max(leaves - ranks, 1)  # the last round ends with one carry
    assert max(len(x.sums) for x in plan_rounds(2**leaves, 2**ranks)) == digits


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_has_a_slice_of_the_gradients_and_staging_for_two_units(mesh: Mesh, stage: int) -> None:
    width, depth, num_leaves = 128, 6, 8
    model = fully_shard(filled(nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])), mesh, stage)
    layers = model.sharding.reducer.buckets
    for micro_batch in model.micro_batches(num_leaves):
        model(numbers(4, width, key=str(micro_batch.index))).square().mean().backward()
        reducer = model.sharding.reducer
        waiting = [n for n, p in zip(reducer.names, reducer.parameters, strict=True) if p.grad is not None]
        assert waiting == ["0.weight", "0.bias"]  # the last to come wait for the word that all went well
    kept = [x for bucket in layers for x in [*bucket.kept, bucket.reduced]]
    most = sum({x.data_ptr(): x.nbytes for x in kept}.values())
    blocks = 2 * math.ceil((width * width / 4096 + 1) / 2)  # of a layer: whole ones, and one for the bias
    layer = blocks * 4096 * 4
    sums = int(math.log2(num_leaves / 2))
    assert most == depth * layer // 2 * sums
    assert sum(x.nbytes for x in model.sharding.reducer._staging) == 2 * layer
    model.close()
