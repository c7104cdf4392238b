"""What torch's DDP trains, sharded: compiled blocks, parameters with odd strides or nothing in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import bits, filled
from tests.replicate.replicas import samples
from tests.world import world


class Odd(nn.Module):
    """Blocks, a gain of one element with a stride, and a parameter of none that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(4).as_strided((1,), (2,)))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.same = self.none

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain + self.none.sum() + self.same.sum()


def trained(mesh: Mesh, stage: int) -> list[Tensor]:
    module = filled(Odd())
    model = DataParallel(module, process_group=mesh) if stage < 2 else fully_shard(module, mesh, stage)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, process_group=mesh, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(samples(mesh.rank, key=str(step))).square().mean().backward()
        optimizer.step()
    state = [x.clone() for x in full_state_dict(module).values()]
    model.close()
    return state


@world(2)
def test_parameters_of_one_element_and_of_none(mesh: Mesh) -> None:
    first, *others = [trained(mesh, stage) for stage in (1, 2, 3)]
    for state in others:
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(state, first, strict=True))
