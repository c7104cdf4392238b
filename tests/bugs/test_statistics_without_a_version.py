"""The kernel of batch norm writes its running statistics without moving their version counter.

A declared step looked for buffers that forward changes by that counter. A layer of one's own that calls
``F.batch_norm`` was not found, and its statistics depended on who had which micro-batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.replicate.nets import WIDTH, mean_square
from tests.world import world


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), self.mean, self.variance, training=self.training)


def step(model: DataParallel) -> None:
    for micro_batch in model.micro_batches(4):
        mean_square(model, micro_batch, 0)


@world(2)
def test_statistics_of_one_s_own_are_refused_by_name(mesh: Mesh) -> None:
    model = DataParallel(OwnNorm(), process_group=mesh)
    with pytest.raises(ValueError, match="forward changed buffer 'mean' in a declared step"):
        step(model)
    model.eval()
    step(model)
    model.close()
