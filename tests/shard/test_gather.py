"""Gathers beside the computation: when they begin, what is recorded of them, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.mesh.find import find_ranks
from instep.mesh.mesh import Mesh
from instep.shard.gather import PARAMETER_GATHER, Gathers, find_source
from instep.shard.unit import Unit
from instep.shard.units import partition
from tests.shard.gathered import LAYERS, Stack, built, gathered_units, in_slices, inputs, loss_of
from tests.world import world


class Broken:
    """A way to slices that fails for unit 1, as often as it is told."""

    def __init__(self, error: Exception, times: int = 1) -> None:
        self.error, self.times = error, times

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None:
        if number == 1 and self.times:
            self.times -= 1
            raise self.error
        for part in parts:
            part.fill_(number)

    def close(self) -> None: ...


def gathers_of(mesh: Mesh, source: Broken) -> tuple[Gathers, list[Unit]]:
    group, recorder = find_ranks(mesh)
    module, _ = built()
    units = [Unit(i, members, group) for i, members in enumerate(partition(module))]
    return Gathers(group, source, recorder, torch.device("cpu")), units


@world(2)
def test_a_gather_that_fails_leaves_nothing_and_the_lane_goes_on_when_told(mesh: Mesh) -> None:
    gathers, units = gathers_of(mesh, Broken(MemoryError("too much")))
    with pytest.raises(MemoryError):
        gathers.need(units[:3])
    assert [unit.gathered_bytes for unit in units[:3]] == [0, 0, 0]
    gathers.recover()
    gathers.need(units[:3])
    assert [unit.shown for unit in units[:4]] == [True, True, True, False]
    assert (units[1].parameters[0] == 1).all()
    gathers.lane.close()


@world(2)
def test_a_lost_rank_stays_lost(mesh: Mesh) -> None:
    gathers, units = gathers_of(mesh, Broken(PeerLost("gone"), times=9))
    for _ in range(2):
        gathers.recover()
        with pytest.raises(PeerLost):
            gathers.need(units[:2])
    assert all(unit.is_free and not unit.gathered_bytes for unit in units)
    gathers.lane.close()


@world(2)
def test_what_is_under_way_can_be_given_up(mesh: Mesh) -> None:
    gathers, units = gathers_of(mesh, Broken(ValueError(), times=0))
    gathers.begin(units)
    for unit in units:
        unit.share("the update")
    assert all(unit.is_free and not unit.gathered_bytes for unit in units)
    gathers.lane.close()


@world(2)
def test_a_gather_that_cannot_begin_gives_the_room_back(mesh: Mesh) -> None:
    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    gathers, units = gathers_of(mesh, Broken(ValueError(), times=0))
    begin, gathers.lane._begin = gathers.lane._begin, no_thread  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        gathers.need(units[:2])
    assert all(unit.is_free and not unit.gathered_bytes for unit in units)
    gathers.lane._begin = begin  # type: ignore[method-assign]
    gathers.need(units[:2])
    assert all((unit.parameters[0] == unit.number).all() for unit in units[:2])
    gathers.lane.close()


@world(2)
def test_every_gather_is_recorded_with_its_unit_and_its_bytes(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        recorder = stage3._gathers._recorder
        loss_of(module).backward()
        loss_of(module).backward()
        mine = [e for e in recorder.events if e.name == PARAMETER_GATHER and e.lane == "communication"]
        # Forward: root and layers. Backward: the layers but the last, which has stayed.
        forward = list(range(LAYERS + 1))
        once = [*forward, *range(LAYERS - 1, 0, -1)]
        assert [event.bucket for event in mine] == once * 2
        for event in mine:
            assert event.bytes == 2 * stage3.units[event.bucket].slice.nbytes


@world(2)
def test_the_next_unit_is_on_its_way_while_one_computes_in_forward_and_in_backward(mesh: Mesh) -> None:
    module, _ = built()
    begun: list[tuple[str, list[bool]]] = []
    with in_slices(mesh, module) as stage3:

        def look(when: str) -> None:
            begun.append((when, [not unit.is_free for unit in stage3.units[1:]]))

        module.layers[2].feed[1].register_forward_hook(lambda *_: look("forward"))
        module.layers[2].feed[1].register_full_backward_hook(lambda *_: look("backward"))
        loss_of(module).backward()
        assert begun[0] == ("forward", [False, False, True, True, False])
        when, taken = begun[1]
        assert when == "backward" and taken[1:3] == [True, True] and not taken[0]


class Backwards(Stack):
    """Its layers run in the opposite order of their registration."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.out(x)


@world(2)
def test_another_order_than_that_of_registration_is_learnt_in_one_step(mesh: Mesh) -> None:
    module, _ = built(Backwards)
    with in_slices(mesh, module) as stage3:
        recorder = stage3._gathers._recorder
        loss_of(module).backward()
        before = len(recorder.events)
        loss_of(module).backward()
        second = [e.bucket for e in recorder.events[before:] if e.lane == "communication"]
        down = list(range(LAYERS, 0, -1))
        assert second == [0, *down, *range(2, LAYERS + 1)]
        with torch.no_grad():
            module(inputs())
        assert gathered_units(stage3) == []


@world(2, backend="shm")
def test_ranks_that_share_memory_send_no_message(mesh: Mesh) -> None:
    (group, _), (gather_group, _) = find_ranks(mesh), find_ranks(mesh)
    gather_group.close()
    module, plain = built()
    units = [Unit(i, members, group) for i, members in enumerate(partition(module))]
    source = find_source(group, gather_group, units)
    for unit in units:
        parts = [torch.empty_like(unit.slice, dtype=torch.float64) for _ in range(2)]
        source.fetch(unit.number, parts, "slices")
        whole = unit.views_in(torch.cat(parts))
        for name, values in zip(unit.names, whole, strict=True):
            assert torch.equal(values, plain.get_parameter(name).double())
    group.barrier("the end")
    group.close()
