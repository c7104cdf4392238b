"""A frozen parameter with a gradient left from before stopped the optimizer, though DDP trains such a model.

Pretrain all, freeze the body, wrap, and hand all parameters to the optimizer: the body's ``.grad`` is an old
one, the same on all ranks, or zeros if it was zeroed in place.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import equal_everywhere, samples, square
from tests.world import world


def pretrained(zeroed: bool) -> nn.Module:
    module = filled(Dense())
    square(module, 7).backward()
    module.layers[0].requires_grad_(False)
    if zeroed:
        module.zero_grad(set_to_none=False)
    return module


@pytest.mark.parametrize("zeroed", [True, False])
@world(2)
def test_a_gradient_from_before_freezing_is_no_obstacle(mesh: Mesh, zeroed: bool) -> None:
    module = pretrained(zeroed)
    model = DataParallel(module, process_group=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        square(model, mesh.rank).backward()
        optimizer.step()
        for p in module.parameters():
            if p.requires_grad:
                p.grad = None
    assert equal_everywhere(mesh, module.parameters())
    model.close()


@world(2)
def test_a_new_gradient_is_one(mesh: Mesh) -> None:
    module = pretrained(zeroed=False)
    model = DataParallel(module, process_group=mesh)
    module.layers[0].requires_grad_(True)
    module.layers[0](samples(mesh.rank)).sum().backward()
    module.layers[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'layers.0.weight' was frozen when the model was wrapped"):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    model.close()
