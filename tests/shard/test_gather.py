"""Gathers beside the computation: when they begin, what they fetch by request, and what a failure leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.mesh.join import find_ranks, init
from instep.mesh.mesh import Mesh
from instep.shard import gather
from instep.shard.gather import PARAMETER_GATHER, Gathers, RequestedShards, find_source
from instep.shard.partition import partition
from instep.shard.stage3 import Stage3
from instep.shard.unit import Unit
from tests.parity import numbers
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
    def no_thread(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    gathers, units = gathers_of(mesh, Broken(ValueError(), times=0))
    submit, gathers.lane.submit = gathers.lane.submit, no_thread  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        gathers.need(units[:2])
    assert all(unit.is_free and not unit.gathered_bytes for unit in units)
    gathers.lane.submit = submit  # type: ignore[method-assign]
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


# Slices that are requested arrive, whichever rank requests which, when, and however often.


def slices(rank: int) -> list[Tensor]:
    return [numbers(40 * (i + 1), key=f"slice {i} of {rank}") for i in range(5)]


@world(3)
def test_every_rank_gets_what_it_asks_for_in_its_own_order_and_number(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    requested = RequestedShards(group, slices(group.rank))
    for number in ([0, 1, 2, 3, 4], [4, 2, 0, 2], [])[group.rank] * 3:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [torch.empty(40 * (number + 1), dtype=dtype) for _ in range(3)]
            requested.fetch(number, parts, "a slice")
            for rank, part in enumerate(parts):
                assert torch.equal(part, slices(rank)[number].to(dtype))
    requested.close()
    group.close()


@world(2, timeout_s=1.0)
def test_an_answer_may_come_after_a_pause_longer_than_any_deadline(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    requested = RequestedShards(group, slices(group.rank))
    parts = [torch.empty(40), torch.empty(40)]
    if mesh.rank == 0:
        requested._servers[0].join(4.0)  # gloo's own limit is 1.1 * 1 s + 2 s
        requested.fetch(0, parts, "a slice")
        assert torch.equal(parts[1], slices(1)[0])
    requested.close()
    requested._servers[0].join(30.0)
    assert not requested._servers[0].is_alive()
    group.close()


@pytest.fixture
def long_farewells(monkeypatch: pytest.MonkeyPatch) -> timedelta:
    """So long that a busy machine is not taken for one that waits."""
    monkeypatch.setattr(gather, "FAREWELL", timedelta(seconds=40))
    return gather.FAREWELL


@world(2)
@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_abandons_or_has_lost_another_does_not_wait_for_farewells(
    mesh: Mesh, lost: bool, long_farewells: timedelta
) -> None:
    group, _ = find_ranks(mesh)
    meeting, _ = find_ranks(mesh)
    requested = RequestedShards(group, slices(group.rank))
    begin = time.monotonic()
    if mesh.rank == 0:
        if lost:
            requested._group.peers.given_up = True
            requested._requests = requested._answers = _Broken()  # type: ignore[assignment]
            with pytest.raises(PeerLost):
                requested.fetch(0, [torch.empty(40), torch.empty(40)], "a slice")
        else:
            requested.abandon()
        requested.close()
    meeting.barrier("rank 0 has closed")
    took_s = time.monotonic() - begin
    requested.abandon()
    requested.close()
    group.close()
    meeting.close()
    assert took_s < long_farewells.total_seconds() / 2


@world(4)
def test_survivors_whose_neighbours_are_gone_end_their_servers(mesh: Mesh) -> None:
    """Each one's next rank has hung up before, and between these two nothing is lost."""
    group, _ = find_ranks(mesh)
    meeting, _ = find_ranks(mesh)
    requested = RequestedShards(group, slices(group.rank))
    requested.abandon()
    if mesh.rank % 2:
        requested.close()
    meeting.barrier("the odd ranks have hung up")
    requested.close()
    for server in requested._servers:
        server.join(30.0)
    assert not any(server.is_alive() for server in requested._servers)
    meeting.barrier("all have looked")
    group.close()
    meeting.close()


class _Broken:
    def together(self, sends: object, receives: object) -> None:
        raise PeerLost("rank 1 is gone")


@world(2, timeout_s=1.0)
def test_a_rank_that_has_gone_is_named(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    requested = RequestedShards(group, slices(group.rank))
    requested.close()
    requested._servers[0].join(30.0)
    if mesh.rank == 0:  # no rank answers any more
        with pytest.raises(PeerLost):
            requested.fetch(0, [torch.empty(40), torch.empty(40)], "a slice")
    group.close()


kept: list[Stage3] = []  # as a program keeps its model to its end


def program(done: Path) -> None:
    mesh = init(backend="gloo")
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    group, recorder = find_ranks(None)
    kept.append(Stage3(module, group, find_ranks(None)[0], recorder))
    group.barrier("the end of rank 1")
    if mesh.rank == 0:
        for _ in range(50):
            module(torch.ones(2, 8)).sum().backward()
        done.touch()


def test_a_process_that_has_ended_its_program_gives_its_slices_until_the_others_have(tmp_path: Path) -> None:
    launch(program, (tmp_path / "done",), ranks=2)
    assert (tmp_path / "done").exists()
