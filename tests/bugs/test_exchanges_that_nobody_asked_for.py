"""``autograd.grad`` through a wrapped model exchanged all gradients, though it accumulates none.

The exchange began where backward reached an output. Asked by one rank alone, for a plot of saliency say, it
waited for the others until the deadline; asked by all, as a gradient penalty does, it reported every
parameter as unused. A discriminator that is frozen for the generator's turn was exchanged too. It now begins
with the first gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_backwards, assert_mean_gradients, samples, square
from tests.world import world


@world(2)
def test_one_rank_alone_may_ask_for_gradients(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    if mesh.rank == 0:
        x = samples(0).requires_grad_()
        assert torch.autograd.grad(model(x).sum(), x)[0].shape == x.shape
        torch.autograd.grad(square(model, 0), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_a_gradient_penalty_finds_no_unused_parameters(mesh: Mesh) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        x = samples(rank).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    model = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=False)
    assert_backwards(mesh, model, loss, times=2)
    model.close()


@world(2)
def test_one_rank_alone_may_train_through_a_frozen_model(mesh: Mesh) -> None:
    critic = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=False)
    critic.requires_grad_(False)
    if mesh.rank == 1:
        x = samples(1).requires_grad_()
        critic(x).sum().backward()
        assert x.grad is not None
    critic.requires_grad_(True)
    square(critic, mesh.rank).backward()
    assert_mean_gradients(mesh, critic.module, square)
    critic.close()


@world(2)
def test_a_penalty_inside_a_declared_step(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    outside = samples(9).requires_grad_()
    out = model(outside).sum()
    for micro_batch in model.micro_batches(2):
        torch.autograd.grad(out, outside, retain_graph=True)  # of a forward before the loop
        square(model, micro_batch.index).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()
