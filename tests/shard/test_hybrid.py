"""Shard groups inside a host, replicated across hosts, and micro-batches that go round the ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh, build
from instep.net.store import backend_timeout
from instep.reduce.tree import rank_major, roots
from instep.replicate.gradient_hashes import GradientHashes, observe_reduction
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.round_plan import deal, plan_rounds
from instep.shard.shard_groups import shard_group_of
from instep.state.hash import tensor_digest
from tests.kinds import Program, assert_same_state, replicated_alone
from tests.parity import filled, numbers, world_of_one
from tests.shard.trained import Wide, assert_same, wide_step
from tests.step.test_every_kind_parity import LOOP, PROGRAMS
from tests.world import raw_groups, world

STAGES = pytest.mark.parametrize("stage", [2, 3])


def test_shard_groups_that_share_memory_and_replicate_groups_that_send_give_the_bits_of_one() -> None:
    store = dist.HashStore()

    @world(4)
    def body(mesh: Mesh) -> None:
        timeout = backend_timeout(mesh.timeout_s)
        makers = {name: raw_groups(name, store, mesh.rank, timeout) for name in ("shm", "gloo")}

        def make(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            return makers["shm" if name.startswith("shard") else "gloo"](name, ranks)

        mixed = build(store, mesh.rank, 4, dp=2, shard=2, timeout_s=mesh.timeout_s, make_group=make)
        assert [mixed.along[name].group.backend for name in ("shard", "dp")] == ["shm", "gloo"]
        for each in PROGRAMS.values():
            assert_same_state(replace(each, kind="stage 3").trained(mixed), replicated_alone(each))
        mixed.close()

    body()


@world(8, pp=2, dp=2, shard=2)
def test_what_another_axis_divides_does_not_mix(mesh: Mesh) -> None:
    pp = mesh.coordinates["pp"]
    group = mesh.data.duplicate()
    assert group.all_gather_bytes(bytes([mesh.rank]), "the test") == [bytes([4 * pp + i]) for i in range(4)]
    each = PROGRAMS["uneven" if pp else "tied and frozen"]
    assert_same_state(replace(each, kind="stage 2").trained(mesh), replicated_alone(each))


@world(4, dp=2, shard=2)
@STAGES
def test_a_rank_has_half_of_the_state_though_there_are_four(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    total = sum(p.numel() for p in Wide().parameters())
    mine = torch.tensor([sum(p.numel() for p in model.parameters())])
    out = torch.empty(4, dtype=torch.int64)
    mesh.world.group.all_gather(out, mine, "the test")
    assert out.tolist() == [out[0], total - out[0]] * 2
    assert model.group.ranks == (0, 1, 2, 3)
    model.close()


def backwards(model: nn.Module, num_leaves: int) -> None:
    step = model.sharding.next_step
    for micro_batch in model.micro_batches(num_leaves):  # type: ignore[operator]
        wide_step(model, micro_batch, step)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        backwards(model, 5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("gone", "stage"), [(0, 3), (1, 2), (2, 2), (3, 3)])
def test_a_rank_that_leaves_the_loop_is_named_in_both_shard_groups_and_all_can_go_on(
    gone: int, stage: int
) -> None:
    @world(4, dp=2, shard=2)
    def body(mesh: Mesh) -> None:
        model = fully_shard(filled(Wide()), mesh, stage)
        optimizer = ShardedOptimizer(model.parameters(), SGD, shard_group_of(mesh), **LOOP)
        if mesh.rank == gone:
            for micro_batch in model.micro_batches(8):
                wide_step(model, micro_batch, 0)
                break
        else:
            with pytest.raises(Desync, match=f"rank {gone} left "):
                backwards(model, 8)
        assert all(p.grad is None for p in model.parameters())
        train(model, optimizer, 1)
        one = Program("replicated", Wide, leaf_step=wide_step, optimizer=SGD, options=LOOP, num_steps=1)
        assert_same(full_state_dict(model), one.trained(world_of_one()).weights, "weights")
        model.close()

    body()


@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 5))
def test_a_shard_group_ends_with_the_roots_of_its_leaves(
    num_leaves: int, num_ranks: int, num_shard_groups: int
) -> None:
    dealt = deal(num_leaves, num_ranks, num_shard_groups)
    assert sorted(micro_batch for own in dealt for micro_batch in own) == list(range(num_leaves))
    assert max(map(len, dealt)) == -(-num_leaves // (num_ranks * num_shard_groups))
    for shard_group, own in enumerate(rank_major(num_leaves, num_shard_groups)):
        rounds = plan_rounds(num_leaves, num_ranks, num_shard_groups, shard_group)
        assert len(rounds) == max(map(len, dealt))
        assert list(rounds[-1].nodes) == roots(own, num_leaves)
        for turn, plan in enumerate(rounds):
            having = [r for r in range(num_ranks) if len(dealt[shard_group * num_ranks + r]) > turn]
            assert list(plan.senders) == having


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_hashes_are_those_of_the_gradients_of_autograd(mesh: Mesh, strategy: str) -> None:
    model = DataParallel(net(), mesh, strategy=strategy, bucket_cap_mb=1e-4)

    def digests(module: nn.Module) -> dict[str, str]:
        return {name: tensor_digest(p.grad).hex()[:16] for name, p in module.named_parameters()}

    def backward(module: nn.Module, index: int) -> None:
        module(numbers(3, 4, key=str(index))).square().mean().backward()

    expected = {}
    for index in range(5):
        backward(plain := net(), index)
        expected[index] = digests(plain)
    for _ in range(2):  # before and after the first step has shown what is whole when
        model.zero_grad()
        with observe_reduction(model._reducer) as seen:
            for micro_batch in model.micro_batches(5):
                backward(model, micro_batch.index)
        assert {int(leaf): x for its in by_rank(mesh, seen) for leaf, x in its.items()} == expected
        assert seen.reduced == digests(model)
    model.close()


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
