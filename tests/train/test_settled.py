"""What ranks were given when they met is no edit of one of them: no exchange hashes the weights for it.

A rank that was sent the state of another has written to its weights, and the other has not: in doubt, all
would hash all that they hold in the first exchange after each recovery. They have compared it just before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import instep
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.recipes.text import TextRecipe
from instep.run.recovery import send
from instep.step import replica_watch
from instep.train.run_config import ParallelConfig
from instep.train.trainer import Trainer
from tests.replicate.test_drift import Loop
from tests.train.test_trainer import config
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


def trained(mesh: Mesh, data: Path, parallel: ParallelConfig) -> Trainer:
    """Rank 1 has just joined; the others have made a step without it, as far as that can be had."""
    trainer = Trainer(TextRecipe(replace(config(data), parallel=parallel)), mesh)
    if mesh.rank != 1:
        with torch.no_grad():
            for p in trainer.module.parameters():
                p.add_(0.01)
    send(trainer, 0)
    return trainer


PLACES = [ParallelConfig(), ParallelConfig(strategy="server")]


@pytest.mark.parametrize("parallel", PLACES, ids=["bucketed", "server"])
def test_no_exchange_hashes_the_weights_for_a_state_that_was_sent(
    parallel: ParallelConfig, data: Path, compared: Counted
) -> None:
    def train(mesh: Mesh) -> None:
        trainer = trained(mesh, data, parallel)
        trainer.step()
        trainer.leave()

    world(3)(train)()
    assert compared == []


def test_what_one_rank_does_after_it_was_sent_the_state_is_seen(data: Path, compared: Counted) -> None:
    def train(mesh: Mesh) -> None:
        trainer = trained(mesh, data, ParallelConfig())
        if mesh.rank == 1:
            with torch.no_grad():
                next(trainer.module.parameters()).add_(0.01)
        with pytest.raises(ReplicasDiffer, match=r"^after 0 optimizer steps, .* rank 1 holds"):
            trainer.step()
        trainer.leave()

    world(3)(train)()
    assert len(compared) == 3


@world(3)
@pytest.mark.parametrize("kind", ["bucketed", "server"])
def test_what_all_have_loaded_is_no_edit_of_the_one_that_had_written_before(
    mesh: Mesh, kind: str, tmp_path: Path, compared: Counted
) -> None:
    loop = Loop(mesh, kind)
    loop.step()
    instep.save(tmp_path, loop.model, loop.optimizer if loop.model is not loop.optimizer else None, step=1)
    with torch.no_grad():
        if mesh.rank == 1:
            loop.module[0].bias.add_(1)
    instep.load(tmp_path, loop.model, loop.optimizer if loop.model is not loop.optimizer else None)
    loop.step()
    assert compared == []
