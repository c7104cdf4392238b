"""Sharded inside a host, replicated across hosts: the bits of one process, for any groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh, build
from instep.net.store import backend_timeout
from instep.reduce.tree import rank_major, roots
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.round_plan import deal, plan_rounds
from instep.shard.shard_groups import shard_group_of
from tests.parity import filled, numbers, world_of_one
from tests.shard.test_fully_plain import LOOP, SCRIPTS, replicated
from tests.shard.trained import (
    Run,
    TiedWide,
    Wide,
    WideImages,
    assert_bits_of_one,
    assert_same,
    images_step,
    matrices_and_vectors,
    plain,
    tokens_step,
    train_fully,
    wide_step,
)
from tests.world import raw_groups, world

STAGES = pytest.mark.parametrize("stage", [2, 3])

RUNS = {
    "clipped, scheduled, two groups": Run(
        Wide, wide_step, groups=matrices_and_vectors, clip=0.1, scheduled=True, num_leaves=8
    ),
    "uneven": Run(Wide, wide_step, num_leaves=21, num_steps=2),
    "fewer micro-batches than shard groups": Run(Wide, wide_step, SGD, LOOP, num_leaves=1),
    "tied and frozen": Run(TiedWide, tokens_step, groups=matrices_and_vectors, num_leaves=7),
    "channels last": Run(WideImages, images_step, num_leaves=3, num_steps=2),
}


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
        for run in RUNS.values():
            assert_bits_of_one(mixed, run, stage=3)
        mixed.close()

    body()


@world(8, pp=2, dp=2, shard=2)
def test_what_another_axis_divides_does_not_mix(mesh: Mesh) -> None:
    pp = mesh.coordinates["pp"]
    group = mesh.data.duplicate()
    assert group.all_gather_bytes(bytes([mesh.rank]), "the test") == [bytes([4 * pp + i]) for i in range(4)]
    assert_bits_of_one(mesh, RUNS["uneven" if pp else "tied and frozen"], stage=2)


@world(4, dp=2, shard=2)
def test_computing_in_bfloat16_has_the_bits_of_one_rank(mesh: Mesh) -> None:
    run = Run(Wide, bfloat16_step, num_leaves=6)
    ours = train_fully(run, mesh, stage=3, compute_dtype=torch.bfloat16)
    alone = train_fully(run, world_of_one(), stage=3, compute_dtype=torch.bfloat16)
    assert_same(ours.module, alone.module, "weights")


def bfloat16_step(model: nn.Module, micro_batch: object, step: int) -> None:
    x = numbers(4, 72, key=f"step {step} leaf {micro_batch.index}").bfloat16()  # type: ignore[attr-defined]
    model(x).float().square().mean().backward()


def test_the_plain_loop_gives_the_bits_of_data_parallel_over_all_ranks() -> None:
    expected: dict[str, dict[str, Tensor]] = {}

    @world(4)
    def replicas(mesh: Mesh) -> None:
        for name, script in SCRIPTS.items():
            found = {key: x.clone() for key, x in replicated(mesh, Wide, script).items()}
            if mesh.rank == 0:
                expected[name] = found

    @world(4, backend="shm", dp=2, shard=2)
    def body(mesh: Mesh) -> None:
        for name, script in SCRIPTS.items():
            model = fully_shard(filled(Wide()), mesh, 2)
            optimizer = ShardedOptimizer(model.parameters(), SGD, shard_group_of(mesh), **LOOP)
            script(model, optimizer, mesh.rank)
            assert_same(full_state_dict(model), expected[name], name)
            optimizer.close()
            model.close()

    replicas()
    body()


@world(4, dp=2, shard=2)
@STAGES
def test_a_rank_has_half_of_the_state_though_there_are_four(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    total = sum(p.numel() for p in model.parameters())
    held = [x for space in model.sharding.spaces for x in space.held]
    mine = torch.tensor([sum(x.last - x.first for x in held)])
    out = torch.empty(4, dtype=torch.int64)
    mesh.world.group.all_gather(out, mine, "the test")
    assert out.tolist() == [out[0], total - out[0]] * 2
    assert model.group.ranks == (0, 1, 2, 3)
    model.close()


@world(4, dp=2, shard=2)
@STAGES
def test_values_and_buffers_are_those_of_the_first_rank_of_all(mesh: Mesh, stage: int) -> None:
    module = filled(Wide())
    module.register_buffer("counts", torch.arange(3.0))
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    with torch.no_grad():
        for x in [*module.parameters(), module.counts]:
            x.add_(mesh.rank)
    model = fully_shard(module, mesh, stage)
    assert_same(full_state_dict(model), expected, "state")
    model.counts.add_(mesh.rank)
    model(numbers(4, 72, key="x")).sum().backward()
    assert torch.equal(model.counts, expected["counts"])  # as in DDP, with every synchronised backward
    model.close()


@world(4, dp=2, shard=2)
def test_what_is_made_on_the_meta_device_has_the_same_values_in_every_shard_group(mesh: Mesh) -> None:
    with torch.device("meta"):
        module = Wide()
    model = fully_shard(module, mesh, 3)
    model.materialise(lambda name, x: x.fill_(len(name) + mesh.coordinates["dp"]))
    expected = {name: torch.full_like(x, len(name)) for name, x in Wide().state_dict().items()}
    assert_same(full_state_dict(model), expected, "those of the first shard group")
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
            with pytest.raises(Desync, match=f"rank {gone} left step 0 before its gradients were complete"):
                backwards(model, 8)
        assert all(p.grad is None for p in model.parameters())
        train(model, optimizer, 1)
        one = plain(Run(Wide, wide_step, SGD, LOOP, num_steps=1))
        assert_same(full_state_dict(model), one.module, "weights")
        model.close()

    body()


@world(4, dp=2, shard=2)
@STAGES
def test_shard_groups_that_are_out_of_step_all_raise(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    with pytest.raises(Desync, match="micro-batches in the step; rank"):
        backwards(model, 4 + mesh.coordinates["dp"])
    model.close()


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
