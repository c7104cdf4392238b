"""The largest floats, from 1.984 times 2**127 on, were rounded to inf by int8 nodes, and the rest of their
block to numbers.

The scale of such a node is not found in its values again: on the way to another rank it became nan. So the
gradient was inf and numbers where nothing travels (one rank, shm), and nan where it does (gloo).
"""

import pytest
import torch
from torch import nn

import instep
from instep.mesh.mesh import Mesh
from instep.reduce.node_format import NodeFormat, Stretch
from tests.parity import world_of_one
from tests.world import world

LARGEST = torch.finfo(torch.float32).max
STILL_FINITE = 127 * 2.0**121
NUM = 200_000  # more than what goes to all ranks in one message


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("largest", "is_finite"), [(LARGEST, False), (-LARGEST, False), (STILL_FINITE, True)]
)
def test_a_block_whose_largest_number_would_become_inf_is_nan_and_travels_so(largest, is_finite, rounding):
    x = torch.ones(8192)
    x[50] = largest
    format_ = NodeFormat("int8", rounding)
    nodes = format_.of_bucket([Stretch(0, 0, 8192)], 8192, 1, torch.float32, torch.device("cpu"))
    nodes.begin(1)
    nodes.round(x, (0, 1))
    assert x[4096:].eq(1).all()
    assert x[:4096].isfinite().all() if is_finite else x[:4096].isnan().all()
    assert nodes.decode(nodes.encode(x)).numpy().tobytes() == x.numpy().tobytes()


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM))

    def forward(self, slope):
        return (self.weight * slope).sum()


def gradient(mesh: Mesh) -> bytes:
    model = instep.DataParallel(Weight(), mesh, nodes="int8", find_unused_parameters=True)
    slope = torch.ones(NUM)
    slope[50] = LARGEST
    for _ in model.micro_batches(1, step=0):
        model(slope).backward()
    return bytes(model.module.weight.grad.numpy().tobytes())


@world(2)
def test_two_ranks_that_send_such_a_gradient_have_the_bits_of_one(mesh: Mesh) -> None:
    assert gradient(mesh) == gradient(world_of_one())
