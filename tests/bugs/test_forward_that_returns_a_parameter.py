"""A hook on every output was a hook on a parameter, where forward returned one, and it stayed there.

Contrastive models return their temperature beside the logits. Each forward left one more hook on it, with
the micro-batch it was made in; the second micro-batch of a declared step then raised, because its backward
"went into the forward of" the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import WIDTH, data
from tests.replicate.replicas import assert_mean_gradients, samples
from tests.world import world


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, 3)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.features(x), self.temperature, x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    features, temperature, _ = model(x)
    return (features * temperature).square().mean()


def test_declared_steps_and_no_hook_stays_on_the_parameter_or_the_input() -> None:
    model = DataParallel(filled(Contrastive()), process_group=world_of_one())
    for micro_batch in model.micro_batches(3):
        x = data(micro_batch, 0).requires_grad_()
        loss_of(model, x).backward()
        assert not x._backward_hooks
    assert not model.module.temperature._backward_hooks


@world(2)
def test_the_plain_loop_with_and_without_synchronisation(mesh: Mesh) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return loss_of(model, samples(rank).requires_grad_())

    model = DataParallel(filled(Contrastive()), process_group=mesh)
    with model.no_sync():
        loss(model, mesh.rank).backward()
    loss(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, lambda module, rank: 2 * loss(module, rank))
    model.close()
