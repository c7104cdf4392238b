"""What a user prints and evaluates is the same on every rank, for every number of ranks."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import instep
from instep.mesh.mesh import Mesh
from instep.ordered.evaluation import _exact_parts
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
    assert told == float(sum(map(Fraction, NUMBERS))) / len(NUMBERS) == instep.mean(NUMBERS)


@world(3, backend="shm")
def test_weights_count_items(mesh: Mesh) -> None:
    told = instep.mean(mine(mesh, NUMBERS), mine(mesh, WEIGHTS), process_group=mesh)
    products = [x * n for x, n in zip(NUMBERS, WEIGHTS, strict=True)]
    assert told == math.fsum(products) / sum(WEIGHTS)


def test_values_may_be_numbers_tensors_and_lists_of_both() -> None:
    assert instep.mean(3) == instep.mean(torch.tensor(3.0, requires_grad=True)) == 3.0
    assert instep.mean([1.0, torch.tensor([[2.0, 3.0]]), [6]]) == 3.0
    assert instep.mean([2.0, 4.0], weights=5) == 3.0
    assert math.isnan(instep.mean([]))
    assert instep.mean([1.0, math.inf]) == math.inf


@given(st.lists(st.floats(-1e300, 1e300), max_size=20))
def test_parts_have_the_very_sum(numbers: list[float]) -> None:
    assert sum(map(Fraction, _exact_parts(numbers))) == sum(map(Fraction, numbers))


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
