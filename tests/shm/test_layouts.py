"""Tensors with a gradient, made for inference, or that overlap take part (layouts: ``test_programs``)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.shm import calls
from tests.shm.calls import group_of
from tests.world import world


@pytest.fixture(params=[True, False], ids=["at once", "async"])
def now(request: pytest.FixtureRequest) -> bool:
    return request.param


@world(2, backend="shm")
def test_autograd_sees_that_a_parameter_was_written(mesh, now):
    pg = group_of(mesh)
    weight = torch.nn.Parameter(torch.full((3,), 1.0 + mesh.rank))
    for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):  # by the core, and by torch
        loss = (weight * weight).sum()
        calls.all_reduce(pg, weight, reduction, now=now).wait()
        assert weight.requires_grad and weight.is_leaf and weight.tolist() == [3, 3, 3]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@world(2, backend="shm")
def test_an_input_may_be_a_part_of_the_output_and_an_output_of_the_input(mesh):
    length = (2 << 20) // 4 + 5
    x = torch.zeros(2, length)
    mine = x[mesh.rank].fill_(mesh.rank + 1.0)
    calls.all_gather_single(group_of(mesh), x, mine).wait()
    assert [set(row.tolist()) for row in x] == [{1.0}, {2.0}]
    calls.reduce_scatter_single(group_of(mesh), mine, x).wait()
    assert set(mine.tolist()) == {2 * (mesh.rank + 1.0)}


@world(2, backend="shm")
def test_tensors_made_for_inference_take_part_inside_and_outside_of_it(mesh, now):
    pg = group_of(mesh)
    with torch.inference_mode():
        x = torch.ones(3)
        calls.all_reduce(pg, x, now=now).wait()
        segment = pg.allocate(16)
    calls.all_reduce(pg, x, now=now).wait()
    out = torch.zeros(6)
    calls.all_gather_single(pg, out, x, now=now).wait()
    assert out.tolist() == [4] * 6
    shared = segment.elements(torch.float32).fill_(mesh.rank + 1)
    calls.all_reduce(pg, shared, now=now).wait()
    assert shared.tolist() == [3] * 4


@world(2, backend="shm")
def test_the_default_device_and_dtype_of_torch_change_nothing(mesh):
    pg = group_of(mesh)
    before = torch.get_default_dtype()
    mine = torch.full((2,), mesh.rank + 1.0, dtype=torch.float32)
    out = torch.zeros(2)
    segment = pg.allocate(8).elements(torch.float32)
    with torch.device("meta"):
        calls.all_to_all_single(pg, out, mine).wait()
        assert pg.map_all([segment]) is not None
        calls.barrier(pg).wait()
        if mesh.rank == 0:
            pg.send([mine], 1, 3).wait()
        else:
            pg.recv([mine], 0, 3).wait()
        other = pg.allocate(8)
    assert torch.get_default_dtype() is before
    assert other.tensor.device.type == "cpu"
    assert out.tolist() == [1, 2]
    assert mine.tolist() == [1, 1]


@world(2, backend="shm")
def test_a_tensor_elsewhere_than_in_memory_is_refused_before_anything_happens(mesh):
    pg = group_of(mesh)
    with pytest.raises(TypeError, match="expected a tensor on the CPU, got one on meta"):
        calls.all_reduce(pg, torch.ones(3, device="meta"))
    odd = torch.full((3,), 2.0 ** (1 + mesh.rank), dtype=torch.float8_e8m0fnu)
    calls.broadcast(pg, odd, 1).wait()  # data of any dtype is moved
    assert odd.float().tolist() == [4.0] * 3
    x = torch.ones(3)
    calls.all_reduce(pg, x).wait()
    assert x.tolist() == [2, 2, 2]
