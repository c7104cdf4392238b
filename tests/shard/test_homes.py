"""Parameters that live somewhere already: the optimizer steps the slices that are there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.shard import checks
from instep.shard.flat_parameters import FlatParameters
from instep.shard.layout import cut
from instep.shard.optimizer import ShardedOptimizer
from instep.state import homes
from instep.state.homes import ParameterShard
from tests.parity import numbers, world_of_one
from tests.shard.given import parameters, steps
from tests.shard.trained import assert_same
from tests.world import world

SHAPES = ((5, 4096), (4099,), (7,), (131, 77), ())


class Away(FlatParameters):
    """A stand-in for a divided module: each rank has its slice, and parameters show NaN between steps."""

    resident = False

    def __init__(self, given: list[nn.Parameter], mesh: Mesh) -> None:
        self.group = mesh.world.group
        self.parameters, self.names = list(given), [f"layer.{i}" for i in range(len(given))]
        self.layout = cut([p.numel() for p in given], self.group.size, 16)
        self.strides = {id(p): p.stride() for p in given}
        self.gradients: dict[int, Tensor] = {}
        self.shared: list[str] = []
        self.let_go_calls = 0
        self.held = []
        for piece in self.layout.pieces(self.group.rank):
            p = given[piece.parameter]
            values = p.detach().flatten()[piece.first : piece.last].clone()
            if piece.last - piece.first == p.numel():
                values = values.view(p.shape)
            self.held.append(ParameterShard(p, piece.first, piece.last, values))
        for p in given:
            p.data = torch.full((), float("nan")).expand(p.shape)
        homes.settle(self)

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self.strides[id(parameter)]

    def set_gradients(self, step: int) -> None:
        for i, p in enumerate(self.parameters):
            p.grad = torch.full((), float("nan")).expand(p.shape)
            self.gradients[id(p)] = numbers(*p.shape, key=f"gradient {i} of step {step}")

    def gradient_of(self, held: ParameterShard) -> Tensor | None:
        if held.parameter.grad is None:
            return None
        return held.part_of(self.gradients[id(held.parameter)])

    def share(self, operation: str) -> bool:
        self.shared.append(operation)
        return False

    def release(self) -> None:
        self.let_go_calls += 1


def step_away(optimizer: ShardedOptimizer, away: Away, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        away.set_gradients(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None for p in away.parameters)


def plain_steps(count: int) -> tuple[list[Tensor], dict[str, Any]]:
    given = parameters(SHAPES)
    optimizer = AdamW(given, fused=True)
    steps(optimizer, given, count)
    return [p.detach() for p in given], optimizer.state_dict()


def assert_holds(away: Away, weights: list[Tensor]) -> None:
    numbered = {id(p): x for p, x in zip(away.parameters, weights, strict=True)}
    for held in away.held:
        wanted = numbered[id(held.parameter)].flatten()[held.first : held.last]
        assert torch.equal(held.tensor.flatten(), wanted)


def assert_steps_what_is_there(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    optimizer = ShardedOptimizer(ours, AdamW, mesh, fused=True)
    places = [p.data_ptr() for p in ours]
    step_away(optimizer, away, 2)
    weights, state = plain_steps(2)
    assert_holds(away, weights)
    assert [p.data_ptr() for p in ours] == places
    assert optimizer.shards.spaces == [away] and optimizer.shards.others_read == (mesh.world.size > 1)
    assert len(away.shared) == 2
    saved = optimizer.state_dict()
    assert_same(saved["state"], state["state"], "state")
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.sharded_state_dict())
    step_away(optimizer, away, 1, first=2)
    assert_holds(away, plain_steps(3)[0])
    optimizer.close()
    assert away.let_go_calls == 0


@world(2)
def test_two_ranks_step_their_slices(mesh: Mesh) -> None:
    assert_steps_what_is_there(mesh)


@world(3, backend="shm")
def test_three_ranks_that_share_memory_step_their_slices(mesh: Mesh) -> None:
    assert_steps_what_is_there(mesh)


def test_one_rank_steps_its_slice() -> None:
    assert_steps_what_is_there(world_of_one())


@world(2)
def test_others_without_a_home_get_flat_memory_beside_it(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours[:3], mesh)
    optimizer = ShardedOptimizer([{"params": ours[2:]}, {"params": ours[:2]}], AdamW, mesh, fused=True)
    for step in range(2):
        for i, p in enumerate(ours):
            p.grad = numbers(*p.shape, key=f"gradient {i} of step {step}")
        away.set_gradients(step)
        optimizer.step()
    weights, _ = plain_steps(2)
    assert_holds(away, weights[:3])
    assert_same([p.detach() for p in ours[3:]], weights[3:], "weights")
    optimizer.close()


@world(2)
def test_what_is_frozen_in_a_home_is_not_stepped_and_need_not_be_given(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    ours[1].requires_grad_(False)
    away = Away(ours, mesh)
    before = [held.tensor.clone() for held in away.held]
    optimizer = ShardedOptimizer([ours[0], *ours[2:]], AdamW, mesh, fused=True)
    away.set_gradients(0)
    ours[1].grad = None
    optimizer.step()
    for held, old in zip(away.held, before, strict=True):
        assert torch.equal(held.tensor, old) == (held.parameter is ours[1])
    optimizer.close()


@world(2)
def test_a_step_waits_for_all_before_it_changes_a_slice_that_others_read(mesh: Mesh) -> None:
    """A rank that has an error leaves the slices as they were everywhere."""
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    away.set_gradients(0)
    if mesh.rank == 1:
        ours[0].grad = None
    before = [held.tensor.clone() for held in away.held]
    with pytest.raises(Desync, match=r"gradients for other parameters.*nothing was changed"):
        optimizer.step()
    assert all(torch.equal(held.tensor, old) for held, old in zip(away.held, before, strict=True))
    step_away(optimizer, away, 1)
    optimizer.close()


@world(2)
def test_a_home_is_taken_whole_and_a_missing_parameter_is_named(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    with pytest.raises(ValueError, match=r"parameter 'layer\.1' is missing: fully_shard has divided it"):
        ShardedOptimizer([ours[0], *ours[2:]], AdamW, mesh)
    optimizer = ShardedOptimizer(ours, AdamW, mesh)  # all of them are free
    step_away(optimizer, away, 1)
    optimizer.close()


@world(2)
def test_classes_that_need_whole_parameters_are_refused(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    with pytest.raises(ValueError, match="Adafactor looks at whole parameters, and fully_shard has cut"):
        ShardedOptimizer(away.parameters, Adafactor, mesh)


@world(4, dp=2, tp=2)
def test_other_ranks_than_the_home_s_are_refused(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    with pytest.raises(ValueError, match=r"divided among ranks \[0, 1, 2, 3\].*pass both the same"):
        ShardedOptimizer(away.parameters, AdamW, mesh["dp"])


@world(2, backend="shm")
def test_one_copy_of_what_is_not_in_one_copy_is_refused(mesh: Mesh) -> None:
    ours = parameters(SHAPES)
    away = Away(ours, mesh)
    with pytest.raises(ValueError, match="fully_shard has given each rank a copy: pass one_copy=True to it"):
        ShardedOptimizer(away.parameters, AdamW, mesh, one_copy=True)


def test_a_home_ends_with_its_space() -> None:
    ours = parameters(SHAPES)
    away = Away(ours, world_of_one())
    assert all(homes.home(p) is away for p in ours)
    del away
    gc.collect()
    assert all(homes.home(p) is None for p in ours)


def test_a_space_that_is_left_is_no_home_and_another_may_follow() -> None:
    ours = parameters(SHAPES)
    first = Away(ours[:2], world_of_one())
    second = Away(ours[1:], world_of_one())
    assert [homes.home(p) for p in ours[:2]] == [first, second]
    homes.leave(first)
    assert [homes.home(p) for p in ours[:2]] == [None, second]


def test_a_parameter_knows_whether_an_optimizer_has_it() -> None:
    (given,) = parameters(((3,),))
    assert not checks.claimed(given)
    optimizer = ShardedOptimizer([given], SGD, world_of_one())
    assert checks.claimed(given)
    optimizer.close()
    assert not checks.claimed(given)
