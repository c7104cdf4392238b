"""Stage 3 where ranks share memory: weights are shown where they lie, and what is written stays out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from instep import ShardedOptimizer, full_state_dict, fully_shard
from instep.mesh.mesh import Mesh
from instep.shard.unit import Unit
from tests.parity import filled, numbers
from tests.shard.gathered import Layer, Stack, assert_same_gradients, built, in_slices, inputs, loss_of
from tests.shard.test_one_copy import memory_of_all
from tests.shard.test_sliced import LOOP, LOOPS, Tied, train, units, weights_of
from tests.world import world


@contextmanager
def sharded(
    mesh: Mesh, module: nn.Module, lr: float = 1e-4, **options: Any
) -> Iterator[tuple[Any, ShardedOptimizer]]:
    model = fully_shard(module, mesh, **options)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **(LOOP | {"lr": lr}))
    yield model, optimizer
    optimizer.close()
    model.close()


def unit_of(model: Any, p: Tensor) -> Unit:
    return next(u for u in model.sharding.stage3.units if any(x is p for x in u.parameters))


def step(model: Any, optimizer: ShardedOptimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", LOOPS)
@world(2, backend="shm")
def test_any_use_of_mapped_weights_has_the_bits_of_data_parallel(mesh: Mesh, name: str) -> None:
    expected = weights_of(mesh, name)
    module = filled(Tied())
    with sharded(mesh, module, lr=LOOP["lr"], units=units(module)) as (model, optimizer):
        train(model, optimizer, mesh.rank, name)
        found = full_state_dict(model)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@world(2, backend="shm")
def test_weights_are_shown_where_all_ranks_have_them_and_nothing_is_gathered(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        shown: list[set[int]] = []
        for _ in range(3):
            places: set[int] = set()
            for layer in module.layers:
                layer.register_forward_hook(lambda m, *_, to=places: to.add(next(m.parameters()).data_ptr()))
            assert torch.equal(loss_of(module), loss_of(plain))
            assert sum(unit.gathered_bytes for unit in stage3.units) == 0
            shown.append(places)
        assert shown[1] - shown[0] == set()  # of each unit the same place every time
        assert not stage3._buffers.free_bytes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@world(2, backend="shm")
def test_what_computes_in_another_dtype_is_gathered(mesh: Mesh, dtype: torch.dtype | None) -> None:
    module, _ = built()
    with in_slices(mesh, module, compute_dtype=dtype) as stage3:
        assert {unit.mapped is None for unit in stage3.units} == {dtype is not None}
        loss_of(module) if dtype is None else module(inputs().to(dtype))
        assert (sum(unit.gathered_bytes for unit in stage3.units) > 0) == (dtype is not None)
        stage3.ended()


class Seeing(nn.Module):
    """A unit whose weight lies in another order than the logical one, and is cut; and one that is as ever."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(32, 64, 3, bias=False).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([conv, nn.Linear(64, 96)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[1](self.layers[0](x).relu().mean((2, 3)))
        return found


@world(2, backend="shm")
def test_some_units_are_mapped_and_others_are_gathered(mesh: Mesh) -> None:
    module, plain = built(Seeing)
    x = numbers(2, 32, 5, 5, key="images")
    with in_slices(mesh, module) as stage3:
        assert sorted(unit.mapped is None for unit in stage3.units) == [False, True]
        for _ in range(2):
            ours, theirs = module(x), plain(x)
            assert torch.equal(ours, theirs)
            ours.square().sum().backward()
            theirs.square().sum().backward()
        assert_same_gradients(module, plain)
        assert [unit.name for unit in stage3.units if not unit.is_free] == []


@world(2, backend="shm")
def test_a_view_keeps_the_values_that_it_had_and_the_place_is_taken_again_when_it_has_gone(
    mesh: Mesh,
) -> None:
    with sharded(mesh, filled(Stack())) as (model, optimizer):
        p = next(model.layers[0].parameters())
        view = p.detach()
        place, before = view.data_ptr(), view.clone()
        for _ in range(2):
            step(model, optimizer)
            assert torch.equal(view, before) and not torch.equal(p, before)
            assert p.data_ptr() != place and unit_of(model, p).gathered_bytes
        del view
        gc.collect()
        step(model, optimizer)
        now = p.clone()
        assert p.data_ptr() == place and not unit_of(model, p).gathered_bytes
        whole = full_state_dict(model)
        assert all(torch.equal(q, whole[name]) for name, q in model.named_parameters())
        assert torch.isfinite(now).all() and not torch.equal(now, before)


class Writing(Layer):
    """Forward writes to a weight where torch does not see it."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            next(self.parameters()).data.mul_(0.5)
        return super().forward(x)


@world(2, backend="shm")
def test_what_one_rank_writes_in_forward_is_forgotten_and_reaches_no_other_rank(mesh: Mesh) -> None:
    module = filled(Stack())
    module.layers[1] = filled(Writing())
    with sharded(mesh, module) as (model, optimizer):
        before = full_state_dict(model)
        plain = loss_of(model)
        plain.backward()
        optimizer.zero_grad()
        model.layers[1].writes = mesh.rank == 1
        other = loss_of(model)
        assert torch.equal(other, plain) == (mesh.rank == 0)
        other.backward()
        optimizer.zero_grad()
        model.layers[1].writes = False
        assert torch.equal(loss_of(model), plain)
        found = full_state_dict(model)
        assert all(torch.equal(found[n], before[n]) for n in before)


@world(2, backend="shm")
def test_a_write_in_forward_that_torch_sees_raises_and_is_undone(mesh: Mesh) -> None:
    module = filled(Stack())
    with sharded(mesh, module) as (model, _):
        expected = loss_of(model).detach()
        model.sharding.stage3.ended()

        def write(m: nn.Module, *_: Any) -> None:
            with torch.no_grad():
                next(m.parameters()).mul_(0.5)

        hook = model.layers[0].register_forward_pre_hook(write)
        with torch.no_grad(), pytest.raises(RuntimeError, match="was written to in forward"):
            loss_of(model)
        hook.remove()
        with torch.no_grad():
            assert torch.equal(loss_of(model), expected)


@world(2, by="process", backend="shm")
def test_the_host_has_the_weights_once_while_all_ranks_compute_with_them(mesh: Mesh) -> None:
    def computed(width: int) -> Any:
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
        model = fully_shard(module, mesh)
        with torch.no_grad():
            model(torch.ones(1, width))
        return model

    computed(64).close()  # what is loaded on first use
    before, width = memory_of_all(mesh), 3072  # 36 MB each
    model = computed(width)
    size, taken = 2 * 4 * width**2, memory_of_all(mesh) - before
    assert abs(taken - size) < 0.1 * size, f"{taken:,} bytes, expected {size:,}"
    model.close()
