"""Rank 0's buffers were written in place, and unnoticed, under graphs that had saved them for backward.

Two forwards, two backwards: the first backward ended with the broadcast, and on every rank but the first the
second one then computed with numbers that its forward had never seen. Nothing raised, since the version
counter was held still. DDP 2.13 does the same in its forward. A buffer that a graph holds is now replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import WIDTH
from tests.replicate.replicas import equal_everywhere, gradients, samples
from tests.world import world


class RunningScale(nn.Module):
    """Divides by a running mean square, which backward needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale = 0.5 * self.scale + 0.5 * x.square().mean(0)
        return self.linear(x) / self.scale


def losses(model: nn.Module, rank: int) -> list[Tensor]:
    return [model(samples(rank, key)).square().mean() for key in ("first", "second")]


@world(2)
def test_the_second_of_two_backwards_computes_with_what_its_forward_saw(mesh: Mesh) -> None:
    by_rank = []
    for rank in range(2):
        alone = filled(RunningScale())
        by_rank.append(torch.autograd.grad(sum(losses(alone, rank)), list(alone.parameters())))
    model = DataParallel(filled(RunningScale()), process_group=mesh)
    for loss in losses(model, mesh.rank):
        loss.backward()
    for ours, *parts in zip(gradients(model.module), *by_rank, strict=True):
        torch.testing.assert_close(ours, sum(parts) / 2)
    assert equal_everywhere(mesh, model.buffers())
    model.close()


@world(2)
def test_batch_norm_s_two_forwards_and_backwards(mesh: Mesh) -> None:
    module = filled(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    model = DataParallel(module, process_group=mesh)
    for loss in losses(model, mesh.rank):
        loss.backward()
    assert equal_everywhere(mesh, [*gradients(module), *module.buffers()])
    model.close()


@world(2)
def test_a_buffer_that_two_modules_share_stays_shared(mesh: Mesh) -> None:
    module = nn.ModuleList([filled(RunningScale()), nn.Module()])
    module[1].register_buffer("same", module[0].scale)
    module.forward = module[0].forward
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True)
    with torch.no_grad():
        module[0].scale.fill_(1.0 + mesh.rank)  # in place: both names see it
    kept = module[0].linear(samples(mesh.rank)) / module[0].scale  # a graph holds it
    module[0].linear(samples(mesh.rank)).sum().backward()
    assert module[1].same is module[0].scale
    assert module[0].scale.tolist() == [1.0] * WIDTH
    kept.sum().backward()
    model.close()


@world(2)
def test_a_buffer_that_nobody_holds_is_written_in_place(mesh: Mesh) -> None:
    module = filled(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    model = DataParallel(module, process_group=mesh)
    mean = module[1].running_mean
    losses(model, mesh.rank)[0].backward()
    losses(model, mesh.rank)[0].backward()
    assert module[1].running_mean is mean
    model.close()
