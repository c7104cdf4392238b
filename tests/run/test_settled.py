"""What ranks were given when they met is no edit of one of them: no exchange hashes the weights for it.

A rank that was sent the state of another has written to its weights, and the other has not: in doubt, all
would hash all that they hold in the first exchange after each recovery. They have compared it just before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import instep
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.run.recovery import send
from instep.step import replica_watch
from tests.replicate.test_drift import Loop
from tests.run.text_training import TextTraining, tiny
from tests.world import world

Counted = list[int]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A number for each time that a rank has hashed all weights in an exchange."""
    counted: Counted = []
    compare = replica_watch.compare_replicas

    def counting(shards: object, step: int, *rest: object) -> object:
        counted.append(step)
        return compare(shards, step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(replica_watch, "compare_replicas", counting)
    return counted


def joined(mesh: Mesh, data: Path) -> TextTraining:
    """Rank 1 has just joined; the others have made a step without it, as far as that can be had."""
    mine = TextTraining(tiny(data), mesh)
    if mesh.rank != 1:
        with torch.no_grad():
            for p in mine.module.parameters():
                p.add_(0.01)
    send(mine.training, 0)
    return mine


@world(3)
def test_no_exchange_hashes_the_weights_for_a_state_that_was_sent(
    mesh: Mesh, data: Path, compared: Counted
) -> None:
    mine = joined(mesh, data)
    mine.step()
    mine.leave()
    assert compared == []


@world(3)
def test_what_one_rank_does_after_it_was_sent_the_state_is_seen(
    mesh: Mesh, data: Path, compared: Counted
) -> None:
    mine = joined(mesh, data)
    if mesh.rank == 1:
        with torch.no_grad():
            next(mine.module.parameters()).add_(0.01)
    with pytest.raises(ReplicasDiffer, match=r"^after 0 optimizer steps, .* rank 1 holds"):
        mine.step()
    mine.leave()
    assert compared


@world(3)
def test_what_all_have_loaded_is_no_edit_of_the_one_that_had_written_before(
    mesh: Mesh, tmp_path: Path, compared: Counted
) -> None:
    loop = Loop(mesh, "bucketed")
    loop.step()
    instep.save(tmp_path, step=1, model=loop.model, optimizer=loop.optimizer)
    with torch.no_grad():
        if mesh.rank == 1:
            loop.module[0].bias.add_(1)
    instep.load(tmp_path, model=loop.model, optimizer=loop.optimizer)
    loop.step()
    assert compared == []
