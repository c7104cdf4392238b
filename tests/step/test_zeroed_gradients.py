"""A gradient of zeros is a gradient: momentum and weight decay go on where a branch is unused for a while.

A loop that zeroes gradients in place (``zero_grad(set_to_none=False)``) gives the optimizer zeros for what a
step did not use. Declared steps took them for None, and the weights of that branch stood still.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers
from tests.world import world

G, NUM_STEPS, WIDTH = 4, 5, 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if both else x


def loss(model: nn.Module, step: int, index: int) -> Tensor:
    x = numbers(2, WIDTH, key=f"{step} {index}")
    return model(x, both=step in (0, 4)).square().mean()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def in_one_process() -> list[Tensor]:
    module = filled(Branches())
    optimizer = sgd(module)
    for step in range(NUM_STEPS):
        for index in range(G):
            (loss(module, step, index) / G).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return list(module.parameters())


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def zero_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("zero", [zero_in_place, zero_by_optimizer])
@world(2)
def test_zeros_are_a_gradient(mesh: Mesh, declared: bool, zero: object) -> None:
    model = DataParallel(filled(Branches()), process_group=mesh, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        if declared:
            for micro_batch in model.micro_batches(G):
                loss(model, step, micro_batch.index).backward()
        else:
            (0.5 * sum(loss(model, step, index) for index in range(mesh.rank, G, 2))).backward()
        optimizer.step()
        zero(model, optimizer)
    torch.testing.assert_close(list(model.parameters()), in_one_process())
    model.close()


@world(3)
def test_a_rank_without_a_micro_batch_has_them_too(mesh: Mesh) -> None:
    model = DataParallel(filled(Branches()), process_group=mesh, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(2):
        for micro_batch in model.micro_batches(2):
            loss(model, step, micro_batch.index).backward()
        assert model.module.sometimes.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model.close()
