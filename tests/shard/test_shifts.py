"""Micro-batches that go round the ranks: each is computed by another one, and the bits stay as they are."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from instep.mesh.mesh import Mesh
from instep.reduce.tree import rank_major
from instep.replicate.gradient_hashes import GradientHashes, observe_reduction
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.round_plan import deal, plan_rounds
from tests.parity import filled, numbers, world_of_one
from tests.shard.trained import assert_same
from tests.world import world

WIDTH = 70  # so that a slice has more than a block


def net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)))


def trained(mesh: Mesh, wrap: str, num_leaves: int, shift: int) -> tuple[dict[str, Any], GradientHashes]:
    """The weights after two steps, and what this rank's micro-batches came to in the second."""
    module: Any = net()
    optimizer = SGD(module.parameters(), lr=0.05, momentum=0.9)
    model: Any
    model = fully_shard(module, mesh, int(wrap)) if wrap in "23" else DataParallel(module, mesh)
    reduction = model.sharding.reducer if wrap in "23" else model._reducer
    reduction.shift = shift
    for step in range(2):
        with observe_reduction(reduction) as seen:
            for micro_batch in model.micro_batches(num_leaves):
                x = numbers(3, 4, key=f"{step} {micro_batch.index}")
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = full_state_dict(model) if wrap in "23" else dict(module.state_dict())
    model.close()
    return weights, seen


_alone: dict[int, tuple[dict[str, Any], GradientHashes]] = {}
_lock = threading.Lock()


def alone(num_leaves: int) -> tuple[dict[str, Any], GradientHashes]:
    """What one rank comes to, once for all who ask."""
    with _lock:
        if num_leaves not in _alone:
            _alone[num_leaves] = trained(world_of_one(), "0", num_leaves, 0)
        return _alone[num_leaves]


def by_rank(mesh: Mesh, seen: GradientHashes) -> list[dict[str, Any]]:
    said = mesh.world.group.all_gather_bytes(json.dumps(seen.leaves).encode(), "a test")
    return [json.loads(x) for x in said]


def assert_bits_of_one_at_each_shift(mesh: Mesh, wrap: str, num_leaves: int) -> None:
    expected, hashes = alone(num_leaves)
    opinions: dict[int, list[int]] = {leaf: [] for leaf in range(num_leaves)}
    for shift in range(mesh.world_size):
        weights, seen = trained(mesh, wrap, num_leaves, shift)
        assert_same(weights, expected, f"shift {shift}")
        everyone = by_rank(mesh, seen)
        assert {int(leaf): x for its in everyone for leaf, x in its.items()} == hashes.leaves
        for rank, its in enumerate(everyone):
            for leaf in its:
                opinions[int(leaf)].append(rank)
    assert all(sorted(ranks) == list(range(mesh.world_size)) for ranks in opinions.values())


@pytest.mark.parametrize(("wrap", "num_leaves"), [("0", 2), ("2", 5), ("3", 2)])
@world(3)
def test_every_rank_in_turn_computes_each_micro_batch_with_the_bits_of_one(
    mesh: Mesh, wrap: str, num_leaves: int
) -> None:
    assert_bits_of_one_at_each_shift(mesh, wrap, num_leaves)


@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 5), st.integers(0, 24))
def test_who_is_to_send_in_a_round_is_who_was_dealt_a_leaf(
    num_leaves: int, num_ranks: int, num_shard_groups: int, shift: int
) -> None:
    dealt = deal(num_leaves, num_ranks, num_shard_groups, shift)
    assert sorted(leaf for own in dealt for leaf in own) == list(range(num_leaves))
    for shard_group in range(num_shard_groups):
        own = iter(
            sorted(leaf for rank in range(num_ranks) for leaf in dealt[shard_group * num_ranks + rank])
        )
        rounds = plan_rounds(num_leaves, num_ranks, num_shard_groups, shard_group, shift)
        for number, plan in enumerate(rounds):
            for sender in plan.senders:
                assert dealt[shard_group * num_ranks + sender][number] == next(own)
        assert next(own, None) is None


@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 5))
def test_a_shift_moves_leaves_and_no_sums(num_leaves: int, num_ranks: int, num_shard_groups: int) -> None:
    cut = rank_major(num_leaves, num_shard_groups)
    for shift in range(num_ranks * num_shard_groups):
        for shard_group in range(num_shard_groups):
            there = (shard_group + shift // num_ranks) % num_shard_groups
            usual = plan_rounds(num_leaves, num_ranks, num_shard_groups, there)
            moved = plan_rounds(num_leaves, num_ranks, num_shard_groups, shard_group, shift)
            assert [(x.sums, x.nodes) for x in moved] == [(x.sums, x.nodes) for x in usual]
            assert sum(len(x.senders) for x in moved) == len(cut[there])
