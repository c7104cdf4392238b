"""Gradients that a program sets, or reduces, by itself: stepped where all ranks have the same, as under DDP.

All of them were refused, because nothing had been exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, square
from tests.world import world


def summed(mesh: Mesh, x: Tensor) -> Tensor:
    mesh.world.group.all_reduce(x, "the program's own sum")
    return x


def by_autograd_grad(mesh: Mesh, model: DataParallel) -> None:
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(square(model, mesh.rank), parameters), strict=True):
        p.grad = summed(mesh, g) / mesh.world.size


def under_no_sync(mesh: Mesh, model: DataParallel) -> None:
    with model.no_sync():
        square(model, mesh.rank).backward()
    for p in model.parameters():
        summed(mesh, p.grad).div_(mesh.world.size)


def to_the_same(mesh: Mesh, model: DataParallel) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize("give", [by_autograd_grad, under_no_sync, to_the_same])
@world(2)
def test_what_is_alike_on_all_ranks_is_stepped(mesh: Mesh, give: Callable[[Mesh, nn.Module], None]) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        give(mesh, model)
        before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
        optimizer.step()
        for p, (x, g) in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), x - 0.1 * g)
        optimizer.zero_grad()
        square(model, mesh.rank).backward()
        assert_mean_gradients(mesh, model.module, square)
        optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(3)
def test_what_differs_on_one_rank_is_an_error_on_all_and_names_it(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    before = [p.detach().clone() for p in model.parameters()]
    to_the_same(mesh, model)
    model.module.layers[3].bias.grad[2] += mesh.rank == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"'layers\.3\.bias' has a gradient, but nothing was exchanged"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    model.sync_gradients()
    optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_what_one_rank_has_of_more_parameters_is_an_error_on_all(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    model.module.layers[0].bias.grad = torch.ones(9)
    if mesh.rank == 1:
        model.module.layers[5].bias.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="set the same on all ranks"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.close()


@world(2)
def test_a_rank_that_exchanges_while_another_steps_is_told(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    if mesh.rank == 0:
        to_the_same(mesh, model)
        act = torch.optim.SGD(model.parameters(), lr=0.1).step
    else:
        act = square(model, mesh.rank).backward
    with pytest.raises(Desync, match=r"with gradients that no exchange has reduced.*in the same order"):
        act()
    model.close()
