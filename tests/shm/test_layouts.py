"""Tensors of any layout take part: strided, scalar, with a gradient, conjugated, made for inference."""

from __future__ import annotations

import pytest
import torch

from tests.shm import calls
from tests.shm.calls import group_of
from tests.shm.numbers import same_bits
from tests.world import world


@pytest.fixture(params=[True, False], ids=["at once", "async"])
def now(request: pytest.FixtureRequest) -> bool:
    return request.param


@world(2, backend="shm")
def test_one_element_with_a_stride_takes_part(mesh, now):
    """Torch calls it contiguous, but its bytes are not next to each other's."""
    pg = group_of(mesh)

    def one() -> torch.Tensor:
        x = torch.tensor([mesh.rank + 1.0, 9.0])[::2]
        assert x.is_contiguous() and x.stride() == (2,)
        return x

    x = one()
    calls.all_reduce(pg, x, now=now).wait()
    assert x.tolist() == [3]
    x = one()
    calls.broadcast(pg, x, 1, now=now).wait()
    assert x.tolist() == [2]
    outs = [one(), one()]
    calls.all_gather(pg, outs, one(), now=now).wait()
    assert [out.tolist() for out in outs] == [[1], [2]]
    calls.all_to_all(pg, outs, [one(), one()], now=now).wait()
    assert [out.tolist() for out in outs] == [[1], [2]]
    x = one()
    calls.reduce_scatter(pg, x, [one(), one()], now=now).wait()
    assert x.tolist() == [3]
    work = pg.send([one()], 1 - mesh.rank, 0)
    pg.recv([x], 1 - mesh.rank, 0).wait()
    work.wait()
    assert x.tolist() == [2 - mesh.rank]
    shared = pg.allocate(8).elements(torch.float32)[::2].fill_(mesh.rank + 1)
    calls.all_reduce(pg, shared, now=now).wait()
    assert shared.tolist() == [3]


@world(2, backend="shm")
def test_parameters_take_part_and_autograd_sees_that_they_were_written(mesh, now):
    pg = group_of(mesh)
    weight = torch.nn.Parameter(torch.full((3,), 1.0 + mesh.rank))
    loss = (weight * weight).sum()
    version = weight._version
    calls.all_reduce(pg, weight, now=now).wait()
    assert weight.tolist() == [3, 3, 3]
    assert weight.requires_grad and weight.is_leaf
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    calls.broadcast(pg, weight, 1, now=now).wait()
    outs = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    calls.all_gather(pg, outs, weight, now=now).wait()
    calls.all_to_all(pg, outs, [weight, weight], now=now).wait()
    calls.reduce_scatter(pg, weight, [weight, weight], now=now).wait()
    assert outs[1].tolist() == [3, 3, 3]
    assert weight.tolist() == [6, 6, 6]


@world(2, backend="shm")
def test_the_input_of_an_all_gather_may_be_its_part_of_the_output(mesh):
    length = (2 << 20) // 4 + 5
    out = torch.zeros(2 * length)
    mine = out.view(2, length)[mesh.rank].fill_(mesh.rank + 1.0)
    calls.all_gather_single(group_of(mesh), out, mine).wait()
    assert [set(row.tolist()) for row in out.view(2, length)] == [{1.0}, {2.0}]


@world(2, backend="shm")
def test_the_output_of_a_reduce_scatter_may_be_its_part_of_the_input(mesh):
    length = (2 << 20) // 4 + 5
    x = torch.arange(2.0 * length)
    mine = x.view(2, length)[mesh.rank]
    calls.reduce_scatter_single(group_of(mesh), mine, x).wait()
    assert same_bits(mine, 2 * torch.arange(2.0 * length).view(2, length)[mesh.rank])


@world(2, backend="shm")
def test_conjugated_and_negated_views_take_part(mesh, now):
    pg = group_of(mesh)
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).mul(mesh.rank + 1).conj()
    calls.broadcast(pg, conjugated, 1, now=now).wait()
    assert conjugated.tolist() == [2 - 4j, 6 + 2j]
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).mul(mesh.rank + 1).conj()
    calls.all_reduce(pg, conjugated, now=now).wait()
    assert conjugated.tolist() == [3 - 6j, 9 + 3j]
    negated = torch._neg_view(torch.tensor([1.0, -2.0]) * (mesh.rank + 1))
    calls.broadcast(pg, negated, 1, now=now).wait()
    assert negated.tolist() == [-2, 4]
    out = torch.zeros(4)
    calls.all_gather_single(pg, out, negated, now=now).wait()
    assert out.tolist() == [-2, 4, -2, 4]


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
