"""What torch's DDP trains, sharded: compiled blocks, parameters with odd strides or nothing in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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


def as_it_is(module: Odd) -> None:
    pass


def by_method(module: Odd) -> None:
    for block in module.blocks:
        block.compile(backend="eager")


def by_function(module: Odd) -> None:
    for i, block in enumerate(module.blocks):
        module.blocks[i] = torch.compile(block, backend="eager")


def trained(
    mesh: Mesh, stage: int, before: Callable[[Odd], None] = as_it_is, after: Callable[[Odd], None] = as_it_is
) -> list[Tensor]:
    module = filled(Odd())
    before(module)
    model = DataParallel(module, process_group=mesh) if stage < 2 else fully_shard(module, mesh, stage)
    after(module)
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


@pytest.mark.parametrize("how", [by_method, by_function])
@world(2, by="process")
def test_stage_3_with_blocks_that_are_compiled(mesh: Mesh, how: Callable[[Odd], None]) -> None:
    plain = trained(mesh, 3)
    states = [trained(mesh, 3, before=how)]
    if how is by_method:
        states.append(trained(mesh, 3, after=how))
    for state in states:
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(state, plain, strict=True))
