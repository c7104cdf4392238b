"""Gradients stand aligned in their bucket, padding adds nothing, and kept gradients are not written over."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.memory import align_bytes
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, flat_real, group_by_cap, make_buckets, num_real

CPU = torch.device("cpu")
KIB = 1 / 1024  # in MiB, the unit of caps
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


def ranks(size: int) -> Group:
    return Group(None, range(size), 0, timeout_s=1.0)


def one_bucket(parameters: list[Tensor], num_ranks: int = 1) -> Bucket:
    (bucket,) = make_buckets(parameters, [range(len(parameters))], ranks(num_ranks))
    return bucket


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.sampled_from(DTYPES), st.integers(1, 9))
@settings(deadline=None)
def test_every_parameter_and_every_slice_stands_on_an_aligned_address(shapes, dtype, num_ranks):
    parameters = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    bucket = one_bucket(parameters, num_ranks)
    start, width = bucket.home.data_ptr(), bucket.dtype.itemsize
    assert start % 64 == 0
    assert bucket.slice_length * width % 64 == 0
    assert bucket.home.numel() == bucket.num_elements == num_ranks * bucket.slice_length
    free = 0
    for slot, parameter in zip(bucket.slots, parameters, strict=True):
        assert slot.offset * width % 64 == 0
        assert slot.offset >= free or not slot.length
        view = bucket.view(slot, bucket.home)
        assert view.shape == parameter.shape
        assert view.is_complex() == parameter.is_complex()
        assert num_real(view) == num_real(parameter) == slot.length
        if view.numel():
            assert view.data_ptr() == start + slot.offset * width
        free = max(free, slot.offset + slot.length)
    assert free <= bucket.num_elements


@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(1, 5))
@settings(deadline=None)
def test_padding_is_minus_zero_and_changes_no_float(sizes, num_ranks):
    bucket = one_bucket(parameters_of(*sizes), num_ranks)
    for buffer in (bucket.home, bucket.counter._spare()):
        for slot in bucket.slots:
            flat_real(bucket.view(slot, buffer)).fill_(1)
        padding = buffer[buffer != 1]
        assert len(padding) == bucket.num_elements - sum(sizes)
        assert bool((padding == 0).all()) and bool(torch.signbit(padding).all())
    floats = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.5, math.inf, -math.inf])
    assert (floats + -0.0).view(torch.int32).tolist() == floats.view(torch.int32).tolist()


def test_buckets_do_not_mix_dtypes_of_the_wire():
    sixteen, sixty_four = parameters_of(256, 256, dtype=torch.bfloat16), parameters_of(64, dtype=torch.double)
    parameters = [sixteen[0], sixty_four[0], *parameters_of(256), sixteen[1]]
    groups = group_by_cap(parameters, [0, 1, 2, 3], 2 * KIB)
    assert groups == [[0, 2], [1], [3]]  # bfloat16 travels as float32; what is not full goes last
    dtypes = [bucket.dtype for bucket in make_buckets(parameters, groups, ranks(1))]
    assert dtypes == [torch.float32, torch.float64, torch.float32]


@given(st.lists(st.integers(0, 600), max_size=30), st.lists(st.floats(0.1, 3), min_size=1, max_size=3))
@settings(deadline=None)
def test_every_parameter_is_in_one_bucket_and_only_the_last_is_not_full(sizes, caps):
    order = list(reversed(range(len(sizes))))
    limits = [cap * KIB for cap in caps]
    groups = group_by_cap(parameters_of(*sizes), order, limits)
    assert [i for group in groups for i in group] == order
    for number, group in enumerate(groups[:-1]):
        limit = limits[min(number, len(limits) - 1)] * (1 << 20)
        assert sum(4 * sizes[i] for i in group) >= limit
        assert sum(4 * sizes[i] for i in group[:-1]) < limit


@pytest.mark.parametrize("caps", [0, -1, [], [1, 0], lambda sizes: []])
def test_caps_are_positive(caps):
    with pytest.raises(ValueError, match="bucket_cap_mb: expected positive sizes in MiB"):
        group_by_cap(parameters_of(1), [0], caps)


def so_many(count: int) -> Callable[[Bucket], int]:
    return lambda _: count


def attached(bucket: Bucket, parameters: list[Tensor]) -> int:
    """Make every ``.grad`` a view of the bucket, as the reducer does."""
    for slot in bucket.slots:
        parameters[slot.position].grad = bucket.view(slot, bucket.home)
    return len(bucket.slots)


def test_a_bucket_stays_where_it_is_while_only_the_gradients_are_its_views():
    parameters = parameters_of(3, 4)
    bucket = one_bucket(parameters)
    for step in range(3):
        address = bucket.home.data_ptr()
        bucket.begin(1, so_many(attached(bucket, parameters)), (range(1),))
        assert bucket.home.data_ptr() == address
        if step == 1:
            parameters[0].grad = None  # as zero_grad does
            bucket.begin(1, so_many(1), (range(1),))
            assert bucket.home.data_ptr() == address


@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g[1:2], lambda g: g.detach()])
@pytest.mark.parametrize("still_attached", [True, False])
def test_a_bucket_moves_rather_than_write_over_a_gradient_that_somebody_kept(keep, still_attached):
    parameters = parameters_of(3, 4)
    bucket = one_bucket(parameters, num_ranks=2)
    num_attached = attached(bucket, parameters)
    bucket.home[:3] = torch.tensor([1.0, 2.0, 3.0])
    kept, address = keep(parameters[0].grad), bucket.home.data_ptr()
    if not still_attached:
        for parameter in parameters:
            parameter.grad = None
        num_attached = 0
    elif kept is parameters[0].grad:
        num_attached, parameters[0].grad = 1, None  # else torch would accumulate into the kept one as well
    expected = kept.tolist()
    bucket.begin(1, so_many(num_attached), (range(1),))
    assert bucket.home.data_ptr() != address
    assert bucket.home.data_ptr() % align_bytes(CPU) == 0
    bucket.home.fill_(9)
    assert kept.tolist() == expected
    address = bucket.home.data_ptr()
    bucket.begin(1, so_many(0), (range(1),))
    assert bucket.home.data_ptr() == address  # once is enough


def test_a_bucket_that_moved_has_new_memory_and_lets_go_of_the_old():
    bucket = one_bucket(parameters_of(3))
    kept = bucket.view(bucket.slots[0], bucket.home)
    old = weakref.ref(bucket.views(bucket.home)[0])
    bucket.begin(1, so_many(0), (range(1),))
    assert bucket.views(bucket.home)[0].data_ptr() == bucket.home.data_ptr() != kept.data_ptr()
    assert bool((bucket.home == 0).all()) and bool(torch.signbit(bucket.home).all())
    assert old() is None
