"""The native sum has the bits of the one in Python, for every order, length, alignment and kind of number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instep.native.library import ADD, DIVIDED, MULTIPLY, core
from instep.reduce.node_format import BucketNodes
from instep.reduce.transport import add_up
from instep.reduce.tree import Sum, plan_sum, rank_major, round_major
from tests.native.without import without_core

pytestmark = pytest.mark.skipif(core() is None, reason="there is no compiled native core")

# Around a vector, a cache line, the core's blocks and torch's pieces.
LENGTHS = (0, 1, 3, 15, 16, 17, 255, 1023, 1024, 2047, 2048, 2049, 4100, 131_072, 131_077)
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    float("inf"),
    float("-inf"),
    5e-324,
    1e-45,
    -1e-39,
    3e38,
    -3e38,
    1e-308,
    2.0**24,
)
TWO = Sum((1, 1), ((0, 1),), ((0, 2),), 0)
PLAIN = BucketNodes(1, 1, torch.float32)
SCALES = (1.0, 0.5, 1 / 3, 1 / 7, 3.0)


def numbers(length: int, dtype: torch.dtype, seed: int, offset: int) -> Tensor:
    """Of mixed magnitude, with special ones in between, ``offset`` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.zeros(length + offset, dtype=dtype)
    scales = 2.0 ** torch.randint(-30, 30, (length,), generator=generator)
    memory[offset:] = torch.randn(length, generator=generator, dtype=torch.float64) * scales
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    places = torch.randint(0, max(length, 1), (length // 3,), generator=generator)
    memory[offset:][places] = special[torch.randint(0, len(special), (length // 3,), generator=generator)]
    return memory[offset:]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def both_ways(values: list[Tensor], plan: Sum, scale: float, homes: tuple[int, ...]) -> None:
    """Add in Python and natively, into the values numbered ``homes`` and one that is no value."""
    with without_core():
        expected = [value.clone() for value in values]
        apart = torch.empty_like(values[0])
        add_up(expected, plan, scale, [*(expected[i] for i in homes), apart], PLAIN)
    found = [value.clone() for value in values]
    home = torch.empty_like(apart)
    add_up(found, plan, scale, [*(found[i] for i in homes), home], PLAIN)
    assert torch.equal(bits(home), bits(apart))
    for i, value in enumerate(values):
        assert torch.equal(bits(found[i]), bits(apart if i in homes else value))


@given(
    st.sampled_from(LENGTHS),
    st.integers(1, 24),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from((torch.float32, torch.float64)),
    st.sampled_from(SCALES),
    st.integers(0, 17),
    st.data(),
)
def test_every_plan_of_every_length_and_alignment_has_the_bits_of_python(
    length, num_leaves, num_ranks, by_round, dtype, scale, offset, data
):
    leaves = round_major(num_leaves, num_ranks) if by_round else rank_major(num_leaves, num_ranks)
    plan = plan_sum(tuple(map(tuple, leaves)), num_leaves)
    values = [numbers(length, dtype, seed, offset + seed) for seed in range(sum(plan.counts))]
    homes = data.draw(st.sets(st.integers(0, len(values) - 1)))
    both_ways(values, plan, scale, tuple(homes))


def test_what_is_no_number_keeps_its_bits_as_far_as_torch_keeps_them():
    payloads = torch.tensor([0x7FC01234, -0x3FEDCC, 0x7F801234, 0x7FC00000], dtype=torch.int32).view(
        torch.float32
    )
    for place in (0, 1):
        values = [torch.ones(200), torch.ones(200)]
        values[place][::3] = payloads.repeat(17)[:67]
        both_ways(values, TWO, 1.0, (0, 1))
        both_ways(values, TWO, 0.25, ())
    both_ways([torch.full((9,), float("inf")), torch.full((9,), float("-inf"))], TWO, 1.0, ())


@pytest.mark.parametrize(("how", "function"), [(ADD, torch.add), (MULTIPLY, torch.mul)])
def test_means_and_products_are_torch_s(how, function):
    native = core()
    for dtype in (torch.float32, torch.float64):
        for length in LENGTHS:
            values = [numbers(length, dtype, seed, 1) for seed in range(3)]
            expected = function(function(values[0], values[1]), values[2]).div_(3)
            home = torch.empty_like(expected)
            addresses = [value.data_ptr() for value in values]
            assert native.add_up(
                addresses, ((0, 1), (0, 2)), 0, [home.data_ptr()], length, dtype.itemsize, how, (DIVIDED, 3.0)
            )
            same = bits(home) == bits(expected)
            assert bool((same | (home.isnan() & expected.isnan())).all())


def test_a_plan_that_makes_no_sense_is_refused():
    x = torch.ones(4)
    for pairs, root in ((((0, 5),), 0), (((0, 0),), 0), (((-1, 0),), 0), ((), 3)):
        assert not core().add_up([x.data_ptr()] * 2, pairs, root, [x.data_ptr()], 4, 4)
    assert x.tolist() == [1.0] * 4
