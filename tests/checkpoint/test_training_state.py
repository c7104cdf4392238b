"""A rank's shards of a state: together they are the state, each element once."""

import torch

from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from instep.state.hash import bare
from tests.state_oracle import state_entries
from tests.training_state import training_state
from tests.world import world


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 3))
    for p in model.parameters():
        p.data = torch.linspace(-1, 1, p.numel()).view(p.shape)
    return model


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()


@world(3)
def test_weights_are_whole_and_moments_in_pieces(mesh: Mesh) -> None:
    model, plain = net(), net()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, mesh, lr=0.1)
    whole = torch.optim.Adam(plain.parameters(), lr=0.1)
    trained(model, optimizer)
    trained(plain, whole)
    entries = dict(state_entries(plain, whole))
    parts = {bare(x.name): x for x in training_state(model, optimizer).hashed()}
    for name, shard in parts.items():
        assert shard.shape == tuple(entries[name].shape)
        assert torch.equal(shard.tensor.reshape(-1), entries[name].reshape(-1)[shard.first : shard.last])
    assert {name for name, shard in parts.items() if not shard.is_whole} <= {
        "exp_avg/0.weight",
        "exp_avg_sq/0.weight",
    }
    held = [name.encode() for name, shard in parts.items() if shard.tensor.numel()]
    everybody = mesh.world.group.all_gather_bytes(b"\n".join(held), "names")
    assert set(b"\n".join(everybody).decode().split("\n")) == set(entries)
    optimizer.close()


def test_without_sharding_they_are_the_entries() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    shards = training_state(model, optimizer).hashed()
    assert [bare(shard.name) for shard in shards] == [n for n, _ in state_entries(model, optimizer)]
    assert all(shard.is_whole for shard in shards)
