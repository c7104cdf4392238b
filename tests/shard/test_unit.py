"""One unit: whose slice is what, how much memory it takes, and what an optimizer finds in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh
from instep.shard.partition import partition
from instep.shard.unit import Unit
from tests.parity import filled, numbers
from tests.shard.given import parameters
from tests.world import world


class Given(nn.Module):
    """Shapes of all kinds: several blocks, less than one, none, a single number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.given = nn.ParameterList(parameters(dtype=dtype))
        self.image = nn.Parameter(
            numbers(6, 5, 3, 3, key="image", dtype=torch.float32)
            .to(dtype)
            .contiguous(memory_format=torch.channels_last)
        )


def unit_of(module: nn.Module, mesh: Mesh, **options: Any) -> Unit:
    (members,) = partition(module)
    group, _ = find_ranks(mesh)
    return Unit(0, members, group, **options)


@world(3)
def test_the_pieces_of_all_ranks_are_the_parameters_each_element_once(mesh: Mesh) -> None:
    before = dict(Given().named_parameters())
    module = Given()
    unit = unit_of(module, mesh)
    for name, p in module.named_parameters():
        covered = torch.zeros(p.numel(), dtype=torch.int64)
        for held in unit.held:
            if held.parameter is p:
                expected = held.part_of(before[name])
                assert torch.equal(held.tensor, expected) and held.tensor.shape == expected.shape
                covered[held.first : held.last] += 1
        unit.group.all_reduce(covered, "the count")
        assert (covered == 1).all(), name
    unit.group.close()


@world(2)
def test_between_steps_a_rank_has_its_slice_and_one_number(mesh: Mesh) -> None:
    unit = unit_of(Given(), mesh)
    count = sum(p.numel() for p in unit.parameters)
    assert count / 2 <= unit.slice.numel() < count / 2 + 4 * 4096
    assert unit.flat.untyped_storage().nbytes() == 0
    assert len({p.untyped_storage().data_ptr() for p in unit.parameters if p.numel()}) == 1
    unit.open()
    assert unit.gathered_bytes == 2 * unit.slice.nbytes
    unit.show()
    for p in unit.parameters:
        assert p.data_ptr() % 64 == 0
    unit.free()
    assert unit.gathered_bytes == 0
    unit.group.close()


@world(2)
@pytest.mark.parametrize(
    ("own", "compute", "masters", "gathered"),
    [
        (torch.float32, None, torch.float32, torch.float32),
        (torch.bfloat16, None, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float64, torch.float16, torch.float64, torch.float16),
    ],
)
def test_masters_have_at_least_float32_where_computation_has_another_dtype(
    mesh: Mesh,
    own: torch.dtype,
    compute: torch.dtype | None,
    masters: torch.dtype,
    gathered: torch.dtype,
) -> None:
    unit = unit_of(Given(own), mesh, compute_dtype=compute)
    assert (unit.slice.dtype, unit.flat.dtype) == (masters, gathered)
    unit.open()
    unit.show()
    assert {p.dtype for p in unit.parameters} == {gathered}
    assert all(p.data_ptr() % 64 == 0 for p in unit.parameters)
    unit.free()
    assert {p.dtype for p in unit.parameters} == {gathered}
    unit.group.close()


@world(2)
def test_a_gradient_comes_from_whoever_has_reduced_it_if_there_is_one(mesh: Mesh) -> None:
    unit = unit_of(filled(nn.Linear(70, 70)), mesh)
    held = unit.held[0]
    assert unit.gradient_of(held) is None
    unit.gradient_source = lambda piece: piece.tensor + 1
    assert unit.gradient_of(held) is None
    held.parameter.grad = torch.zeros(held.parameter.shape)
    assert torch.equal(unit.gradient_of(held), held.tensor + 1)
    unit.group.close()


@world(1)
def test_gathering_is_no_change_of_a_parameter_to_autograd(mesh: Mesh) -> None:
    module = filled(nn.Linear(5, 4))
    unit = unit_of(module, mesh)
    versions = [p._version for p in unit.parameters]
    for _ in range(2):
        unit.open()
        unit.flat.copy_(unit.slice)
        unit.show()
        unit.free()
    assert [p._version for p in unit.parameters] == versions
    unit.group.close()
