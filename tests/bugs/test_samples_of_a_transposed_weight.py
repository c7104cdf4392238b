"""Each exchange carries a sample of the weights, and of a transposed one a piece is a column of its memory.

A column has a stride, and torch does not view it as bytes: a step of such a model raised torch's
"self.stride(-1) must be 1 to view Float as Byte". torch's DDP trains it.
"""

import torch
from torch import nn

from instep.mesh.mesh import Mesh
from tests.parity import Training, assert_bits_of_one, numbers
from tests.world import world


def transposed() -> nn.Module:
    """Rows so long that a sample is a part of one of them."""
    layer = nn.Linear(216, 72)
    layer.weight = nn.Parameter(torch.zeros(216, 72).t())
    return layer


def square(model, micro_batch, step):
    model(numbers(2, 216, key=f"{step} {micro_batch.index}")).square().mean().backward()


TRAINING = Training(transposed, square, num_leaves=2, num_steps=8)


@world(2)
def test_a_model_with_one_trains(mesh: Mesh) -> None:
    assert_bits_of_one(mesh, TRAINING)
