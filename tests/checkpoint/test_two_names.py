"""Each tensor of a state is written once, under one name, by one rank: states that once did not come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import instep
from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.optimizer import ShardedOptimizer
from instep.state.hash import SharedHash
from instep.state.shards import without_ties
from tests.parity import filled
from tests.state_oracle import state_digests, state_entries
from tests.training_state import training_state
from tests.world import world

LONG = 3 * 4096


class Inside(nn.Module):
    """Like a wrapper: everything that it has is in ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class WithBuffers(nn.Module):
    """Weights and buffers of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LONG))
        self.register_buffer("first", torch.zeros(LONG))
        self.register_buffer("second", torch.zeros(LONG))

    def forward(self, x: Tensor) -> Tensor:
        """The gradient of its sum is ``x``."""
        return x * self.weight


def test_what_shares_memory_under_two_names_is_stored_once() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("again", nn.Parameter(module.weight.data))
    state = training_state(module, SGD(module.parameters(), lr=0.1))
    assert state.ties() == {"again": "weight"}
    assert [shard.name for shard in without_ties(state.shards(), state.ties())] == [
        "model:weight",
        "model:bias",
    ]
    hashed = [shard.name for shard in state.hashed()]
    assert hashed == ["model:weight", "model:bias", "model:again"]  # by object, as the hash always was


@world(2)
def test_all_buffers_of_a_divided_state_are_those_of_one_rank(mesh: Mesh, tmp_path: Path) -> None:
    module = filled(WithBuffers())
    optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, lr=0.1)
    for buffer in module.buffers():
        buffer.fill_(mesh.rank)  # as forwards in training mode leave them where nothing sends them
    save(tmp_path, step=1, model=module, optimizer=optimizer)
    fresh = WithBuffers()
    mesh.data.group.barrier("saving")
    load(tmp_path, model=fresh)
    assert {x for buffer in fresh.buffers() for x in buffer.tolist()} == {0.0}


def test_a_module_in_two_wrappers_has_one_name(tmp_path: Path) -> None:
    net = filled(nn.Linear(3, 3))
    model, optimizer = Inside(Inside(net)), SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = nn.Linear(3, 3)
    fresh = SGD(other.parameters(), lr=0.1, momentum=0.9)
    assert load(tmp_path, model=Inside(Inside(other)), optimizer=fresh).step == 1
    assert torch.equal(other.weight, net.weight)
    assert torch.equal(*(x.state[p.weight]["momentum_buffer"] for x, p in ((fresh, other), (optimizer, net))))


@world(4, dp=2, shard=2)
def test_shard_groups_that_take_turns_hold_one_state(mesh: Mesh) -> None:
    model = DataParallel(filled(WithBuffers()), process_group=mesh)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh["dp"], lr=0.1, momentum=0.9)
    model(torch.ones(LONG)).sum().backward()
    optimizer.step()
    state = training_state(model, optimizer)
    found, _ = SharedHash(state.group).digests(state.owned(state.hashed()), 1)
    alone = filled(WithBuffers())
    steps = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    alone.weight.grad = torch.ones(LONG)
    steps.step()
    assert found == state_digests(state_entries(alone, steps), 1)[0]
    model.close()


@world(2, by="process")
def test_masters_of_another_dtype_are_refused_before_they_change(mesh: Mesh, tmp_path: Path) -> None:
    if not mesh.rank:
        save(tmp_path, step=1, model=filled(nn.Linear(4, 4)))
    mesh.data.group.barrier("saving")
    module = nn.Linear(4, 4).bfloat16()
    sharded = instep.fully_shard(module, mesh)
    before = instep.full_state_dict(sharded)
    with pytest.raises(CheckpointRejected, match=r"weight.*float32|float32.*weight"):
        load(tmp_path, model=sharded)
    after = instep.full_state_dict(sharded)
    assert all(torch.equal(before[name], after[name]) for name in before)
