"""What a user prints and evaluates is the same on every rank, for every number of ranks."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.net.process_group import alone
from instep.run.step import share
from tests.world import world

NUMBERS = [0.1 * 3**k * (-1) ** k for k in range(11)]
WEIGHTS = [1, 2, 0, 3, 5, 1, 1, 7, 1, 2, 4]


def mine(mesh: Mesh, items: list) -> list:
    """Unequal shares; the last rank has none."""
    first, last = [(0, 7), (7, 11), (11, 11)][mesh.rank]
    return items[first:last]


@world(3)
def test_a_mean_over_ranks_is_that_of_one_process_to_the_bit(mesh: Mesh) -> None:
    told = instep.mean(mine(mesh, NUMBERS), process_group=mesh)
    assert told == float(sum(map(Fraction, NUMBERS)) / len(NUMBERS)) == instep.mean(NUMBERS)
    # An infinite value beside a finite sum that no float holds was an OverflowError.
    values = [math.inf] if mesh.rank else [-1e308, -1e308]
    assert instep.mean(values, process_group=mesh) == math.inf


@world(3, backend="shm")
def test_weights_count_items(mesh: Mesh) -> None:
    told = instep.mean(mine(mesh, NUMBERS), mine(mesh, WEIGHTS), process_group=mesh)
    products = [Fraction(x) * n for x, n in zip(NUMBERS, WEIGHTS, strict=True)]
    assert told == float(sum(products) / sum(WEIGHTS))


def test_values_may_be_numbers_tensors_and_lists_of_both() -> None:
    assert instep.mean(3) == instep.mean(torch.tensor(3.0, requires_grad=True)) == 3.0
    assert instep.mean([1.0, torch.tensor([[2.0, 3.0]]), [6]]) == 3.0
    assert instep.mean([2.0, 4.0], weights=5) == 3.0
    assert math.isnan(instep.mean([]))
    assert instep.mean([1.0, math.inf]) == math.inf


@given(
    st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**62)), max_size=9)
)
def test_a_mean_is_exact_and_rounded_once(items: list[tuple[float, int]]) -> None:
    """It was 0.10000000000000002 for one 0.1 that counts three times."""
    total = sum((Fraction(x) * Fraction(float(n)) for x, n in items), Fraction())
    count = sum((Fraction(float(n)) for _, n in items), Fraction())
    told = instep.mean([x for x, _ in items], [n for _, n in items])
    assert math.isnan(told) if not count else told == float(total / count)


@pytest.mark.parametrize("values", ["abc", {"a": 1.0}, [{"a": 1.0}], None, b"1"])
def test_what_is_no_number_is_refused(values: object) -> None:
    with pytest.raises(
        TypeError, match=r"instep\.mean: expected numbers, tensors, arrays or a list of these"
    ):
        instep.mean(values)


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, np.ones(2), 3.0])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    with pytest.raises(
        TypeError, match=r"instep\.gather: expected tensors, got a .*: pass torch.as_tensor\(x\)"
    ):
        instep.gather(value)


def test_arrays_are_numbers() -> None:
    assert instep.mean([np.array([1.0, 2.0]), np.float32(6.0), np.array(7)]) == 4.0


@world(2)
def test_a_mistake_of_one_rank_is_told_to_all(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="expected as many weights as values, got 3 for 2: pass one"):
        instep.mean([1.0, 2.0], [1, 2, 3] if mesh.rank else 1, process_group=mesh)
    with pytest.raises(ValueError, match="expected as many rows in each tensor and in index, got 2, 3"):
        instep.gather(torch.ones(2), index=range(2 + mesh.rank), process_group=mesh)
    words = re.escape("tensor 0 of torch.float32 and shape ('rows', 2) on rank 0, but")
    with pytest.raises(ValueError, match=words):
        instep.gather(torch.ones(2, 2 + mesh.rank), process_group=mesh)


@world(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_rows_come_in_the_order_of_the_ranks(mesh: Mesh, dtype: torch.dtype) -> None:
    rows = torch.arange(22).view(11, 2).to(dtype)
    first, last = [(0, 7), (7, 11), (11, 11)][mesh.rank]
    assert torch.equal(instep.gather(rows[first:last], process_group=mesh), rows)


@world(3)
def test_each_sample_comes_once_and_in_the_order_of_samples(mesh: Mesh) -> None:
    predictions, labels = torch.rand(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) * 2
    # What a DistributedSampler gives: ten samples, twelve places, two of them repeated.
    samples = torch.tensor([i % 10 for i in range(mesh.rank, 12, 3)])
    told = instep.gather(predictions[samples], labels[samples], index=samples, process_group=mesh)
    assert torch.equal(told[0], predictions)
    assert torch.equal(told[1], labels)


def test_one_process_needs_no_group() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    assert torch.equal(instep.gather(rows, index=[2, 0, 1]), rows.detach()[[1, 2, 0]])
    assert instep.gather(torch.tensor(1.5)).tolist() == [1.5]
    with pytest.raises(ValueError, match="expected a tensor, got none"):
        instep.gather()


@world(2, by="process")
def test_the_default_group_is_found_as_by_a_wrapper(mesh: Mesh) -> None:
    rank = dist.get_rank()
    for _ in range(2):  # the second time over the group of the first
        assert instep.mean(float(rank)) == 0.5
    assert instep.gather(torch.tensor([rank])).tolist() == [0, 1]


class Named(nn.Linear):
    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(generator=generator)


def test_the_default_device_is_for_the_script_s_tensors_alone() -> None:
    """As of ``torch.set_default_device``: generators, norms and the order of rows stay on the CPU."""
    net, again = Named(3, 2), Named(3, 2)
    instep.initialize(again, seed=1)
    net(torch.ones(3)).sum().backward()
    rows = torch.tensor([2.0, 1.0, 1.0])
    with torch.device("meta"):
        instep.initialize(net, seed=1)
        norm = instep.clip_grad_norm_(net.parameters(), 1.0)
        gathered = instep.gather(rows, index=[1, 0, 0])
        told = share({"stop": 1.0}, [2.0], alone())
    assert torch.equal(net.weight, again.weight)
    assert norm.item() == 8**0.5
    assert gathered.tolist() == [1.0, 2.0]
    assert told == ({"stop": 1.0}, [[2.0]])
