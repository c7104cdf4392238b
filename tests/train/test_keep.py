"""What a run goes on from: the newest state that can be trusted, under the contract of its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from instep.checkpoint.save import MODEL_FILE
from instep.elastic.memory import Copy, tensor_bytes
from instep.errors import CheckpointRejected, ContractBroken
from instep.train import recipes
from instep.train.config import Config
from instep.train.folder import CHECKPOINTS
from instep.train.keep import Checkpoints, MemoryCopy, find
from instep.train.state import capture, restore_copy
from instep.train.trainer import Trainer
from tests.parity import world_of_one


@pytest.fixture
def config(data: Path) -> Config:
    return replace(recipes.tiny(), data=data, steps=9)


def saved(config: Config, path: Path, *steps: int) -> Trainer:
    """A trainer that has made the last of ``steps``, and saved after each of them."""
    trainer, checkpoints = Trainer(config, world_of_one()), Checkpoints(path, 60)
    while trainer.steps_done < max(steps):
        trainer.step()
        if trainer.steps_done in steps:
            checkpoints.save(trainer)
    checkpoints.close()
    return trainer


class Held(MemoryCopy):
    """A memory copy of ``trainer``, without a supervisor."""

    def __init__(self, trainer: Trainer) -> None:
        description, live = capture(trainer)
        self.copy = Copy.create(2 * len(description), tensor_bytes(live))
        self.copy.write(description, live)
        self._copy = self.copy

    def restore(self, trainer: Trainer) -> None:
        restore_copy(trainer, self.copy)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda c: replace(c, batch=replace(c.batch, micro_size=4)),
            "batch.micro_size: 2 in the checkpoint, 4 now",
        ),
        (
            lambda c: replace(c, parallel=replace(c.parallel, threads=2)),
            "parallel.threads: 1 in the checkpoint, 2 now",
        ),
        (
            lambda c: replace(c, model=replace(c.model, tied=False)),
            "model.tied: true in the checkpoint, false now",
        ),
        (lambda c: replace(c, seed=5), "seed: 0 in the checkpoint, 5 now"),
    ],
    ids=["micro-batch", "threads", "layer", "seed"],
)
def test_another_contract_is_refused_by_name(
    config: Config, tmp_path: Path, change: Callable[[Config], Config], line: str
) -> None:
    saved(config, tmp_path, 2)
    other = Trainer(change(config), world_of_one())
    before = other.state_sha256()
    with pytest.raises(ContractBroken, match="pass --accept-contract") as refused:
        Checkpoints(tmp_path, 60).restore(other)
    assert f"  {line}" in str(refused.value).splitlines()
    assert other.state_sha256() == before


def test_a_new_contract_can_be_accepted_and_is_told(config, tmp_path):
    old = saved(config, tmp_path, 2)
    micro = replace(config.batch, micro_size=4)
    new = Trainer(replace(config, batch=micro, accept_contract=True), world_of_one())
    source, told = Checkpoints(tmp_path, 60).restore(new)
    assert source.endswith("step-00000002")
    assert "batch.micro_size: 2 in the checkpoint, 4 now" in told["accepted"]
    assert new.state_sha256() == old.state_sha256()


def test_nothing_is_the_beginning_also_for_who_has_been_elsewhere(config, tmp_path):
    trainer = Trainer(config, world_of_one())
    before = trainer.state_sha256()
    trainer.step()
    assert find(trainer, None, Checkpoints(tmp_path, 60)) == ("the beginning", {})
    assert (trainer.state_sha256(), trainer.steps_done, trainer.fresh) == (before, 0, True)


@pytest.mark.parametrize(("in_memory", "source"), [(2, "disk"), (3, "memory"), (4, "memory")])
def test_the_newer_of_memory_and_disk_is_taken(config, tmp_path, in_memory, source):
    saved(config, tmp_path / "run", 3)
    held = Held(saved(config, tmp_path / "other", in_memory))
    trainer = Trainer(config, world_of_one())
    found, _ = find(trainer, held, Checkpoints(tmp_path / "run", 60))
    assert trainer.steps_done == max(in_memory, 3)
    assert (found == "the memory copy") == (source == "memory")


def test_a_checkpoint_that_cannot_be_trusted_does_not_keep_memory_from_being_used(config, tmp_path):
    saved(config, tmp_path, 1, 4)
    held = Held(saved(config, tmp_path / "other", 3))
    weights = tmp_path / CHECKPOINTS / "step-00000004" / MODEL_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    trainer = Trainer(config, world_of_one())
    assert find(trainer, held, Checkpoints(tmp_path, 60))[0] == "the memory copy"
    assert trainer.steps_done == 3
    (tmp_path / CHECKPOINTS / "step-00000001" / MODEL_FILE).write_bytes(b"")
    with pytest.raises(CheckpointRejected):
        Checkpoints(tmp_path, 60).restore(trainer)
