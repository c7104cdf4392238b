"""Stages 2 and 3 give the bits of one process: weights and moments, declared steps, one to four ranks."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.step.micro_batches import MicroBatch
from tests.parity import filled
from tests.replicate.nets import PLAIN, WIDTH, Segments, data, requires_input
from tests.shard.trained import (
    FUSED,
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
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
STAGES = [2, 3]

RUNS = {
    "cut": Run(Wide, wide_step, num_steps=4),
    "cut, clipped, scheduled, two groups": Run(
        Wide, wide_step, groups=matrices_and_vectors, clip=0.1, scheduled=True, num_leaves=8
    ),
    "fewer micro-batches than ranks": Run(Wide, wide_step, SGD, LOOP, num_leaves=1),
    "tied and frozen": Run(TiedWide, tokens_step, groups=matrices_and_vectors, num_leaves=7),
    "channels last": Run(WideImages, images_step, num_leaves=3),
}
ODD = {
    name: Run(training.module, training.leaf_step, SGD, LOOP, num_leaves=min(training.num_leaves, 5))
    for name, training in PLAIN.items()
}


SEVERAL = ODD.pop("two backwards")


@world(2)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_give_the_bits_of_one(mesh: Mesh, stage: int) -> None:
    """The odd models in stage 3."""
    for run in [*RUNS.values(), *(ODD.values() if stage == 3 else ())]:
        assert_bits_of_one(mesh, run, stage=stage)


@world(2)
@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_in_a_micro_batch_need_to_be_told_and_say_so(mesh: Mesh, stage: int) -> None:
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        train_fully(SEVERAL, mesh, stage=stage)
    assert_bits_of_one(mesh, SEVERAL, stage=stage, overlap=False)


@world(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_reentrant_checkpoint_used_several_times_is_whole_when_it_is_sent(mesh: Mesh, stage: int) -> None:
    again = Run(lambda: Segments(reentrant=True), requires_input, SGD, LOOP, num_leaves=5)
    assert_bits_of_one(mesh, again, stage=stage)


class Recomputed(nn.Module):
    """Two units, of which one is in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[1](checkpoint(self.layers[0], x, use_reentrant=True).tanh())
        return found


def penalised(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    loss = model(data(micro_batch, step).requires_grad_()).square().mean()
    (loss + sum(p.square().sum() for p in model.parameters())).backward()  # autograd begins with the last


@world(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_is_used_in_a_reentrant_checkpoint_and_outside_is_not_sent_half(
    mesh: Mesh, stage: int
) -> None:
    """One gradient comes from outside, and ends the wait for its unit; that of the checkpoint comes later."""
    both = Run(Recomputed, penalised, SGD, LOOP, num_leaves=2)
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        train_fully(both, mesh, stage=stage)
    assert_bits_of_one(mesh, both, stage=stage, overlap=False)


@world(2)
@pytest.mark.parametrize("stage", STAGES)
def test_given_units_give_the_same_bits(mesh: Mesh, stage: int) -> None:
    module = filled(Wide())
    model = fully_shard(module, mesh, stage, units=[module.layers])
    assert [space.names for space in model.sharding.spaces] == [
        [name for name, _ in module.named_parameters()]
    ]
    optimizer = ShardedOptimizer(model.parameters(), AdamW, mesh, **FUSED)
    run = RUNS["cut"]
    for step in range(run.num_steps):
        for micro_batch in model.micro_batches(run.num_leaves):
            run.leaf_step(model, micro_batch, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_state_dict(model), plain(run).module, "module")
    optimizer.close()
    model.close()
