"""One bit, one nan: exactly that, where it was asked for, and behind torch's back."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from instep.elastic.bits import flip_bit, poison, poisoned

WIDTHS = {
    torch.float16: 16,
    torch.bfloat16: 16,
    torch.float32: 32,
    torch.float64: 64,
    torch.int64: 64,
    torch.uint8: 8,
    torch.complex64: 64,
}


def integer(x: torch.Tensor) -> int:
    """The memory of ``x`` as one number."""
    return int.from_bytes(x.detach().contiguous().view(torch.uint8).numpy().tobytes(), "little")


@pytest.mark.parametrize(
    ("dtype", "bit"), [(d, bit) for d, width in WIDTHS.items() for bit in (0, 5, width - 1)]
)
def test_one_bit_of_one_element_flips_and_flips_back(dtype, bit):
    x = torch.arange(1, 7).to(dtype)
    before = integer(x)
    flip_bit(x, 4, bit)
    assert before ^ integer(x) == 1 << (4 * WIDTHS[dtype] + bit)
    flip_bit(x, 4, bit)
    assert integer(x) == before


def test_a_bit_of_a_float_is_worth_what_its_place_says():
    x = torch.ones(2)
    flip_bit(x, 1, 22)
    flip_bit(x, 0, 31)
    assert x.tolist() == [-1.0, 1.5]
    assert struct.unpack("<I", struct.pack("<f", 1.5))[0] == 0x3F800000 | 1 << 22


def test_elements_are_counted_in_logical_order():
    x = torch.zeros(3, 4).t()  # (4, 3), not contiguous
    flip_bit(x, 7, 31)
    assert [math.copysign(1, value) for value in x.reshape(-1).tolist()] == [1] * 7 + [-1] + [1] * 4
    one = torch.zeros(())
    poison(one)
    assert math.isnan(one.item())


@pytest.mark.parametrize(("index", "bit"), [(6, 0), (-1, 0), (0, 32), (0, -1)])
def test_what_is_not_there_cannot_flip(index, bit):
    with pytest.raises(ValueError, match="expected one of the"):
        flip_bit(torch.zeros(6), index, bit)


def test_autograd_does_not_notice():
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    version = weight._version
    flip_bit(weight, 1, 22)
    poison(weight, 2)
    assert weight._version == version
    loss.backward()  # would raise if a version had moved
    assert weight.grad is not None
    assert weight.grad[:2].tolist() == [2.0, 3.0]
    assert math.isnan(weight.grad[2])


def test_one_element_is_poisoned():
    x = torch.zeros(2, 3)
    poison(x, 4)
    assert torch.isnan(x).reshape(-1).tolist() == [i == 4 for i in range(6)]
    with pytest.raises(ValueError, match=r"got torch.int64, which has no nan"):
        poison(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_loss_has_its_value_and_a_nan_for_one_gradient(dtype):
    first, second = (torch.nn.Parameter(torch.full((2,), 3.0, dtype=dtype)) for _ in range(2))
    clean = (first * second).sum().float()
    loss = poisoned(clean, first)
    loss.backward()
    assert loss.item() == clean.item() and loss.dtype == clean.dtype
    assert torch.isnan(first.grad).all()
    assert second.grad.tolist() == [3.0, 3.0]
