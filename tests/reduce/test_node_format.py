"""Formats of tree nodes: what a node is rounded to, wherever it lies, and what of it travels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, make_buckets
from instep.reduce.node_format import BucketNodes, NodeFormat, RandomBits, Stretch
from tests.reduce.rounded_nodes import FORMATS, by_hand

SIZES = (5000, 3, 4096, 70, 12_300, 1, 600)
EVERY = pytest.mark.parametrize("nodes", FORMATS, ids=str)
NODE, STEP = (4, 6), 11


def drawn(sizes: Sequence[int] = SIZES, key: int = 0) -> list[Tensor]:
    """One tensor per parameter, of magnitudes far apart."""
    random = np.random.default_rng(key)
    return [
        torch.tensor(random.standard_normal(n) * 10 ** random.uniform(-3, 3, n), dtype=torch.float32)
        for n in sizes
    ]


def filled(
    values: Sequence[Tensor], nodes: NodeFormat, num_ranks: int = 1, order: Sequence[int] | None = None
) -> Bucket:
    """One bucket of ``num_ranks`` slices, with ``values`` in ``order``."""
    groups = [range(len(values)) if order is None else order]
    (bucket,) = make_buckets(values, groups, Group(None, range(num_ranks), 0, 1.0), nodes=nodes)
    bucket.begin_nodes(1, STEP, 0)
    for position, view in views(bucket).items():
        view.copy_(values[position])
    return bucket


def views(bucket: Bucket) -> dict[int, Tensor]:
    """The parameters in ``bucket``, by position."""
    return dict(zip([slot.position for slot in bucket.slots], bucket.views(bucket.home), strict=True))


def rounded(values: Sequence[Tensor], nodes: NodeFormat, *bucket_of: Any) -> dict[int, Tensor]:
    """``values`` as they are after each slice of a bucket is rounded."""
    bucket = filled(values, nodes, *bucket_of)
    for first in range(0, len(bucket.home), bucket.slice_length):
        bucket.nodes.round(bucket.home[first : first + bucket.slice_length], NODE, first)
    return views(bucket)


def assert_same_bits(ours: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> None:
    for i, x in ours.items():
        assert x.numpy().tobytes() == expected[i].numpy().tobytes()


@EVERY
def test_every_element_is_rounded_as_the_format_says(nodes: NodeFormat) -> None:
    for i, ours in rounded(drawn(), nodes).items():
        assert ours.numpy().tobytes() == by_hand(drawn()[i].numpy(), nodes, STEP, NODE, i).tobytes()


@EVERY
@given(
    num_ranks=st.integers(1, 5), order=st.permutations(range(len(SIZES))), taken=st.integers(1, len(SIZES))
)
@settings(deadline=None, max_examples=25)
def test_a_value_depends_on_no_bucket_and_no_slice(
    nodes: NodeFormat, num_ranks: int, order: list[int], taken: int
) -> None:
    assert_same_bits(rounded(drawn(), nodes, num_ranks, order[:taken]), rounded(drawn(), nodes))


@EVERY
def test_what_travels_is_the_node_to_the_bit_and_a_half_or_a_quarter_of_its_bytes(nodes: NodeFormat) -> None:
    bucket = filled(drawn((70_000, 30, 9000, 1)), nodes, 3)
    bucket.nodes.round(bucket.home, NODE)
    wire = bucket.nodes.encode(bucket.home)
    assert wire.nbytes == bucket.nodes.wire_bytes
    assert wire.nbytes <= bucket.nbytes * {"bfloat16": 0.5, "int8": 0.251}[nodes.nodes]
    rows = wire.view(3, -1)
    found = [bucket.nodes.decode(row, i * bucket.slice_length) for i, row in enumerate(rows)]
    assert torch.cat(found).numpy().tobytes() == bucket.home.numpy().tobytes()


@EVERY
def test_a_node_that_was_rounded_is_rounded_to_itself(nodes: NodeFormat) -> None:
    once = rounded(drawn(), nodes)
    assert_same_bits(rounded(list(once.values()), replace(nodes, seed=8)), once)


@EVERY
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_makes_no_other_parameter_so(nodes: NodeFormat, odd: float) -> None:
    values = drawn()
    values[0][4999] = odd
    values[0].view(torch.int32)[0] = 0x7FFFFFFF  # a nan whose bits overflow
    values[2].view(torch.int32)[0] = -1
    once = rounded(values, nodes)
    for i in (0, 2):
        assert not once[i][0].isfinite()
    assert not once[0][4999].isfinite()
    assert all(once[i].isfinite().all() for i in (1, 3, 4, 5, 6))
    if nodes.nodes == "int8":
        assert once[0].isnan().all()


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_stochastic_rounding_is_right_on_average_and_to_nearest_is_not(name: str) -> None:
    x = torch.full((1, 4096), 1.0 + 0.3 * 2**-8 if name == "bfloat16" else 0.3)
    x[0, 0] = 127.0
    total = {rounding: torch.zeros(4096) for rounding in ("nearest", "stochastic")}
    trials = 400
    for rounding, sums in total.items():
        bucket = filled(x, NodeFormat(name, rounding))
        for leaf in range(trials):
            bucket.home.copy_(x[0])
            bucket.nodes.round(bucket.home, (leaf, leaf + 1))
            sums += bucket.home
    step = 2**-7 if name == "bfloat16" else 1.0
    mean = {rounding: (sums[1:] / trials - x[0, 1:]) / step for rounding, sums in total.items()}
    assert abs(mean["stochastic"].mean()) < 5e-4 * 3
    assert mean["stochastic"].abs().max() < 0.15  # each element by itself, not only all together
    assert abs(mean["nearest"].mean()) > 0.1


def test_random_bits_of_neighbours_nodes_and_parameters_have_nothing_in_common() -> None:
    n = 1 << 16
    stretches = [Stretch(0, 0, n // 2), Stretch(1, n // 2, n // 2)]
    drawn_at = {}
    for step, node in ((0, (0, 1)), (0, (1, 2)), (0, (0, 2)), (1, (0, 1))):
        source = RandomBits(0, stretches, n, torch.device("cpu"))
        source.key = 1, step, 0
        drawn_at[step, node] = (source.draw(n, node, 0).double() / 2**32).numpy()
    for x in drawn_at.values():
        assert abs(x.mean()) < 0.01 and abs(x.std() - 12**-0.5) < 0.01
        for lag in (1, 2, 15, 16, 17, 4096, n // 2):
            assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 0.02
    assert np.abs(np.corrcoef(list(drawn_at.values())) - np.eye(4)).max() < 0.02
    top = ((drawn_at[0, (0, 1)] + 0.5) * 256).astype(int)
    counts = np.bincount(top, minlength=256)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 330  # chi square of 255 degrees: 1 in 1000


@EVERY
@pytest.mark.parametrize("sizes", [(4096,), (8192, 4096), (4100, 30)])
def test_what_lies_between_parameters_has_no_say_once_it_is_cleared(
    nodes: NodeFormat, sizes: tuple[int, ...]
) -> None:
    bucket = filled(drawn(sizes), nodes)
    bucket.home.fill_(1e9)
    for position, view in views(bucket).items():
        view.copy_(drawn(sizes)[position])
    bucket.nodes.clear(bucket.home)
    bucket.nodes.round(bucket.home, NODE)
    assert_same_bits(views(bucket), rounded(drawn(sizes), nodes))


def test_in_float32_nothing_is_done() -> None:
    bucket = filled(drawn(), NodeFormat(), 3)
    home = bucket.home
    before = home.clone()
    assert type(bucket.nodes) is BucketNodes
    bucket.nodes.round(home, NODE)
    assert torch.equal(home, before)
    assert bucket.nodes.encode(home) is home and bucket.nodes.decode(home) is home
    assert bucket.nodes.wire_bytes == bucket.nbytes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NodeFormat("fp8"), "nodes='fp8': expected one of float32, bfloat16, int8"),
        (lambda: NodeFormat("int8", "up"), "rounding='up': expected one of nearest, stochastic"),
        (lambda: NodeFormat(rounding="stochastic"), "choose a smaller format"),
    ],
)
def test_a_format_that_there_is_not_is_refused(make: Callable[[], NodeFormat], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


LARGEST, STILL_FINITE = torch.finfo(torch.float32).max, 127 * 2.0**121


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("largest", "is_finite"), [(LARGEST, False), (-LARGEST, False), (STILL_FINITE, True)]
)
def test_a_block_whose_largest_number_would_become_inf_is_nan_and_travels_so(
    largest: float, is_finite: bool, rounding: str
) -> None:
    """Its scale is not found in its values again: it was inf and numbers here, and nan where it is sent."""
    x = torch.ones(8192)
    x[50] = largest
    bucket = filled([x], NodeFormat("int8", rounding))
    bucket.nodes.round(bucket.home, NODE)
    (found,) = views(bucket).values()
    assert found[4096:].eq(1).all()
    assert found[:4096].isfinite().all() if is_finite else found[:4096].isnan().all()
    sent = bucket.nodes.decode(bucket.nodes.encode(bucket.home))
    assert sent.numpy().tobytes() == bucket.home.numpy().tobytes()
