"""A parameter of one element may have any stride, as a slice of something larger; torch calls it contiguous.

``contiguous()`` returned it as it was, and ``view(torch.uint8)`` wants stride 1: wrapping such a model,
hashing it and saving it raised torch's "self.stride(-1) must be 1 to view Float as Byte". torch's DDP trains
it.
"""

import pytest
import torch
from torch import nn

import instep
from instep.memory import as_bytes
from instep.mesh.mesh import Mesh
from instep.state.hash import tensor_digest
from tests.parity import Training, assert_bits_of_one, numbers
from tests.world import world

NUMBERS = torch.arange(8.0)
ODD = {
    "one of a row": NUMBERS[:2].as_strided((1,), (2,)),
    "a column of one row": NUMBERS.view(2, 4)[1:, 3:],
    "none": NUMBERS.as_strided((0, 3), (5, 2)),
}


@pytest.mark.parametrize("name", ODD)
def test_its_bytes_and_its_hash_are_those_of_a_copy(name):
    x = ODD[name]
    plain = torch.tensor(x.tolist()).view(x.shape)
    assert as_bytes(x).numpy().tobytes() == plain.numpy().tobytes()
    assert tensor_digest(x) == tensor_digest(plain)


def test_bytes_of_what_is_contiguous_are_its_memory():
    x = torch.zeros(3)
    as_bytes(x)[3] = 63  # the highest byte of the first float
    assert x[0] == 0.5


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4).as_strided((1,), (2,)))
        self.register_buffer("shift", torch.ones(4).as_strided((1,), (2,)))

    def forward(self, x):
        return self.layer(x) * self.gain + self.shift


def square(model, micro_batch, step):
    model(numbers(2, 4, key=f"{step} {micro_batch.index}")).square().mean().backward()


TRAINING = Training(Gain, square)


@world(2)
@pytest.mark.parametrize("init_sync", [True, "verify"])
def test_a_model_with_one_trains(mesh: Mesh, init_sync) -> None:
    assert_bits_of_one(mesh, TRAINING, init_sync=init_sync)


def test_a_model_with_one_is_saved_and_loaded(tmp_path):
    model, other = Gain(), Gain()
    instep.save(tmp_path, step=1, model=model)
    assert instep.load(tmp_path, model=other).step == 1
    assert torch.equal(model.layer.weight, other.layer.weight)
