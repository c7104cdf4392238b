"""Fused optimizers read parameter, gradient and moments in the order of memory, and do not compare strides.

Gradients were contiguous views of their bucket also where the parameter was channels_last, so a fused AdamW
or SGD updated every weight with the gradient of another one, on one process as on many, without an error.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers, world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.world import world


def conv() -> nn.Module:
    return filled(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)


def step(model: nn.Module, fused: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    for turn in range(2):
        optimizer.zero_grad()
        model(numbers(2, 3, 5, 5, key=f"images {turn}")).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
def test_a_channels_last_parameter_is_updated_with_its_own_gradient(fused: bool) -> None:
    plain, module = conv(), conv()
    step(plain, fused)
    step(DataParallel(module, process_group=world_of_one()), fused)
    assert torch.equal(module.weight, plain.weight)


@world(2)
def test_its_gradient_has_its_layout_on_two_ranks_too(mesh: Mesh) -> None:
    model = DataParallel(conv(), process_group=mesh)
    for turn in range(2):
        model(numbers(2, 3, 5, 5, key=f"images {turn} {mesh.rank}")).square().mean().backward()
        assert model.module.weight.grad.stride() == model.module.weight.stride()
        assert equal_everywhere(mesh, [model.module.weight.grad])
    model.close()
