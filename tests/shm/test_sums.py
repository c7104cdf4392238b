"""Adding in the order of the ranks, in place or not, and how long messages are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instep.shm.collectives import combine, own_slice, pieces, reduction_name
from tests.shm.numbers import FLOATS, REDUCTIONS, defined, op, reduced, same_bits, values

DTYPES = (*FLOATS, torch.int8, torch.int64)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_result_may_be_written_over_any_addend(name, count):
    for dtype in DTYPES:
        if not defined(name, dtype):
            continue
        originals = [values(rank, 33, dtype) for rank in range(count)]
        expected = reduced(originals, name)
        for place in range(count + 1):
            parts = [x.clone() for x in originals]
            out = parts[place] if place < count else torch.empty_like(expected)
            combine(parts, name, out)
            assert same_bits(out, expected), (dtype, place)
            others = [rank for rank in range(count) if rank != place]
            assert all(same_bits(parts[rank], originals[rank]) for rank in others)


def test_the_order_of_the_addends_can_be_seen():
    parts = [torch.tensor([x]) for x in (2.0**24, 1.0, 1.0)]
    out = torch.empty(1)
    combine(parts, "sum", out)
    assert out.item() == 2.0**24
    combine(parts[::-1], "sum", out)
    assert out.item() == 2.0**24 + 2


def test_half_precision_numbers_are_rounded_once():
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    combine(parts, "sum", out)
    assert out.item() == 258.0  # one after the other: 256


def test_averages_of_integers_are_cut_off_towards_zero():
    for numbers, expected in (((3, 4), 3), ((-3, -4), -3), ((-1, 0), 0), ((7, 8), 7)):
        out = torch.empty(1, dtype=torch.int32)
        combine([torch.tensor([x], dtype=torch.int32) for x in numbers], "avg", out)
        assert out.item() == expected


def test_numbers_that_are_none_stay_none():
    for name in ("sum", "min", "max", "product"):
        out = torch.empty(2)
        combine([torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])], name, out)
        assert out.isnan().all()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_have_torch_s_names(name):
    assert reduction_name(op(name), torch.int64) == name
    assert reduction_name(dist.ReduceOp(op(name)), torch.int64) == name


@given(st.integers(0, 5000), st.integers(1, 700))
def test_pieces_are_everything_in_order_and_none_is_too_long(length, most):
    cut = list(pieces(length, most))
    assert [i for start, end in cut for i in range(start, end)] == list(range(length))
    assert all(end - start <= most for start, end in cut)
    assert len(cut) == max(1, -(-length // most))


@given(st.integers(0, 300_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_the_slices_of_all_ranks_are_everything_once_and_share_no_line(count, itemsize, size):
    found = [own_slice(count, itemsize, rank, size) for rank in range(size)]
    assert [found[0].start, *(one.stop for one in found)] == [0, *(one.start for one in found[1:]), count]
    assert all(one.start * itemsize % 64 == 0 for one in found if one.start < one.stop)
