"""What a script has registered, as a run takes it over: built alone, joined, left; and where values come from
for what was built without any.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.registered import Registered
from instep.elastic.heartbeat import Heartbeat
from instep.errors import CheckpointRejected, ContractBroken
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.rng.keys import initialize
from instep.run.rank_state import Holds
from instep.run.script_training import ScriptTraining
from instep.run.settings import ScriptConfig
from tests.parity import world_of_one
from tests.rejoin import slice_bytes, unranked
from tests.world import world

CONFIG = GPTConfig(layers=2, width=96, heads=2, context=8, tied=True)
SEED = 7


def training_of(model: nn.Module, optimizer: torch.optim.Optimizer, **others: object) -> ScriptTraining:
    registered = Registered({"model": model, "optimizer": optimizer, **others})
    return ScriptTraining(ScriptConfig(), registered, Heartbeat())


def from_meta(*, seed: int | None = SEED) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        net = GPT(CONFIG)
    model = instep.fully_shard(net, unranked())
    if seed is not None:
        model.materialise(seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def expected() -> GPT:
    net = GPT(CONFIG)
    initialize(net, SEED)
    return net


@world(2)
def test_a_model_from_the_meta_device_is_filled_where_ranks_meet(mesh: Mesh) -> None:
    """No rank has ever more than its slices of it, nor a copy of what was built."""
    model, optimizer = from_meta()
    training = training_of(model, optimizer)
    training.keep()
    assert slice_bytes(model) == 0
    assert training._built is not None
    assert not training._built._built.shards
    training.join(mesh, wrappers=True)
    training.begin()
    num_bytes = sum(p.numel() * p.itemsize for p in expected().parameters())
    assert slice_bytes(model) < 0.6 * num_bytes
    for name, value in instep.full_state_dict(model).items():
        assert torch.equal(value, expected().state_dict()[name]), name
    training.leave()
    assert slice_bytes(model) == 0


def test_beside_it_another_model_keeps_what_it_was_built_with() -> None:
    model, optimizer = from_meta()
    torch.manual_seed(1)
    head = instep.DataParallel(nn.BatchNorm1d(3), unranked())
    nn.init.normal_(head.module.weight)
    built = {name: x.clone() for name, x in head.module.state_dict().items()}
    training = training_of(model, optimizer, head=head)
    training.keep()
    with torch.no_grad():
        head.module.weight.zero_()
    for _ in range(2):  # it was left in the beginning
        training.join(world_of_one(), wrappers=True)
        training.begin()
        assert all(torch.equal(x, built[name]) for name, x in head.module.state_dict().items())
        for name, value in instep.full_state_dict(model).items():
            assert torch.equal(value, expected().state_dict()[name]), name
        training.leave()


def test_what_no_one_says_how_to_fill_is_named() -> None:
    training = training_of(*from_meta(seed=None))
    training.keep()
    training.join(world_of_one(), wrappers=True)
    with pytest.raises(
        ValueError, match=r"'embedding\.tokens\.weight' was on the meta .* call materialise\(\)"
    ):
        training.begin()
    training.leave()


@world(2)
def test_ranks_that_would_fill_it_otherwise_are_told(mesh: Mesh) -> None:
    training = training_of(*from_meta(seed=mesh.rank))
    training.keep()
    training.join(mesh, wrappers=True)
    with pytest.raises(ValueError, match=r"the ranks differ in the first values .* the same seed on all"):
        training.begin()
    training.leave()


class Reader:
    """Where a rank stands in data of its own."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("apart", [0, 1])
@world(2)
def test_an_object_whose_state_is_each_rank_s_own_is_refused(mesh: Mesh, apart: int) -> None:
    """Only rank 0's was saved, and a rank that took a lost one's place went on with that."""
    model = instep.DataParallel(nn.Linear(2, 2), unranked())
    training = training_of(
        model, torch.optim.SGD(model.parameters(), lr=0.1), reader=Reader(apart * mesh.rank)
    )
    training.join(mesh, wrappers=True)
    if apart:
        with pytest.raises(ContractBroken, match=r"registered object 'reader' has state .* on every rank"):
            training.begin()
    else:
        training.begin()
        training.compare_replicas()
    training.leave()


def test_weights_that_are_loaded_while_ranks_have_not_met_are_kept(tmp_path: Path) -> None:
    net = expected()
    instep.save(tmp_path, model=net, step=0)
    model, optimizer = from_meta(seed=None)
    instep.load(tmp_path, model=model)
    training = training_of(model, optimizer)
    training.keep()
    training.join(world_of_one(), wrappers=True)
    training.begin()
    for name, value in instep.full_state_dict(model).items():
        assert torch.equal(value, net.state_dict()[name]), name
    training.leave()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_alone_has_no_state_any_more_when_it_has_left(stage: int) -> None:
    """Slices of weights, and moments of shards, are given up with their group, of one rank too."""
    net, mesh = nn.Linear(4, 3), unranked()
    if stage > 1:
        model = instep.fully_shard(net, mesh, stage)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        model = instep.DataParallel(net, mesh)
        optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh)
    training = training_of(model, optimizer)
    training.keep()
    training.join(world_of_one(), wrappers=True)
    training.begin()
    training.rank_state.agreed(complete=not training.state.is_divided)
    assert training.rank_state.holds is Holds.EVERYTHING
    training.leave()
    assert training.rank_state.holds is Holds.NOTHING
    training.agreed()
    training.join(world_of_one(), wrappers=True)
    with pytest.raises(CheckpointRejected, match="no rank has the run's state"):
        training.begin()
    training.leave()
