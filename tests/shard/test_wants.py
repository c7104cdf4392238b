"""Slices that are asked for arrive, whoever asks for which, when, and however often."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from instep.errors import PeerLost
from instep.mesh.find import find_ranks
from instep.mesh.join import init
from instep.mesh.launch import launch
from instep.mesh.mesh import Mesh
from instep.shard import wants
from instep.shard.stage3 import Stage3
from instep.shard.wants import Asked
from tests.parity import numbers
from tests.world import world


def slices(rank: int) -> list[Tensor]:
    return [numbers(40 * (i + 1), key=f"slice {i} of {rank}") for i in range(5)]


@world(3)
def test_every_rank_gets_what_it_asks_for_in_its_own_order_and_number(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    asked = Asked(group, slices(group.rank))
    for number in ([0, 1, 2, 3, 4], [4, 2, 0, 2], [])[group.rank] * 3:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [torch.empty(40 * (number + 1), dtype=dtype) for _ in range(3)]
            asked.fetch(number, parts, "a slice")
            for rank, part in enumerate(parts):
                assert torch.equal(part, slices(rank)[number].to(dtype))
    asked.close()
    group.close()


@world(2, timeout_s=1.0)
def test_an_answer_may_come_after_a_pause_longer_than_any_deadline(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    asked = Asked(group, slices(group.rank))
    parts = [torch.empty(40), torch.empty(40)]
    if mesh.rank == 0:
        asked._server.join(4.0)  # gloo's own limit is 1.1 * 1 s + 2 s
        asked.fetch(0, parts, "a slice")
        assert torch.equal(parts[1], slices(1)[0])
    asked.close()
    asked._server.join(5.0)
    assert not asked._server.is_alive()
    group.close()


@pytest.fixture
def long_farewells(monkeypatch: pytest.MonkeyPatch) -> timedelta:
    """So long that a busy machine is not taken for one that waits."""
    monkeypatch.setattr(wants, "FAREWELL", timedelta(seconds=40))
    return wants.FAREWELL


@world(2)
@pytest.mark.parametrize("lost", [False, True])
def test_who_abandons_or_has_lost_a_rank_does_not_wait_for_farewells(
    mesh: Mesh, lost: bool, long_farewells: timedelta
) -> None:
    group, _ = find_ranks(mesh)
    meeting, _ = find_ranks(mesh)
    asked = Asked(group, slices(group.rank))
    begin = time.monotonic()
    if mesh.rank == 0:
        if lost:
            asked._group.peers.given_up = True
            asked._questions = asked._answers = _Broken()  # type: ignore[assignment]
            with pytest.raises(PeerLost):
                asked.fetch(0, [torch.empty(40), torch.empty(40)], "a slice")
        else:
            asked.abandon()
        asked.close()
    meeting.barrier("rank 0 has closed")
    took_s = time.monotonic() - begin
    asked.abandon()
    asked.close()
    group.close()
    meeting.close()
    assert took_s < long_farewells.total_seconds() / 2


class _Broken:
    def together(self, sends: object, receives: object) -> None:
        raise PeerLost("rank 1 is gone")


@world(2, timeout_s=1.0)
def test_a_rank_that_has_gone_is_named(mesh: Mesh) -> None:
    group, _ = find_ranks(mesh)
    asked = Asked(group, slices(group.rank))
    asked.close()
    asked._server.join(5.0)
    if mesh.rank == 0:  # nobody answers any more
        with pytest.raises(PeerLost):
            asked.fetch(0, [torch.empty(40), torch.empty(40)], "a slice")
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
