"""Sharded inside a host, replicated across hosts: the bits of one process, for any groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.round_plan import deal, plan_rounds
from instep.shard.shard_groups import shard_group_of
from tests.kinds import Program, assert_same_state, replicated_alone
from tests.parity import filled, world_of_one
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
