"""Adding in the order of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instep.shm.collectives import combine, own_slice, reduction_name
from tests.shm.numbers import REDUCTIONS, op


def test_the_order_of_the_addends_can_be_seen():
    parts = [torch.tensor([x]) for x in (2.0**24, 1.0, 1.0)]
    out = torch.empty(1)
    combine(parts, "sum", out)
    assert out.item() == 2.0**24
    combine(parts[::-1], "sum", out)
    assert out.item() == 2.0**24 + 2


def test_reductions_have_torch_s_names():
    options = dist.AllreduceOptions()
    for name in REDUCTIONS:
        options.reduceOp = dist.ReduceOp(op(name))
        assert reduction_name(options) == name
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(TypeError, match="expected a reduction out of sum, avg, product"):
        reduction_name(options)


def test_complex_numbers_are_added_and_averaged():
    for name, factor in (("sum", 3), ("avg", 1)):
        out = torch.empty(2, dtype=torch.complex64)
        combine([torch.tensor([1 + 2j, -3j]) * n for n in (1, 2, 6)], name, out)
        assert out.tolist() == [factor * (3 + 6j), factor * -9j]


@given(st.integers(0, 300_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_the_slices_of_all_ranks_are_everything_once_and_share_no_line(count, itemsize, size):
    found = [own_slice(count, itemsize, rank, size) for rank in range(size)]
    assert [found[0].start, *(one.stop for one in found)] == [0, *(one.start for one in found[1:]), count]
    assert all(one.start * itemsize % 64 == 0 for one in found if one.start < one.stop)
