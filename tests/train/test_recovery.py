"""What a run goes on from: the newest state that can be trusted, under the contract of its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from instep.checkpoint.load import read_manifest
from instep.checkpoint.manifest import MANIFEST_FILE
from instep.checkpoint.save import MODEL_FILE
from instep.errors import CheckpointRejected, ContractBroken
from instep.recipes import text_config
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config
from instep.run.folder import CHECKPOINTS
from instep.run.rank_state import Holds
from instep.run.recovery import Checkpoints, Snapshots, restore_newest
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.snapshots import Supervisor, snapshots_of


@pytest.fixture
def config(data: Path) -> Config:
    return replace(text_config.tiny(), data=data, steps=9)


def saved(config: Config, path: Path, *steps: int) -> Trainer:
    """A trainer that has made the last of ``steps``, and saved after each of them."""
    trainer, checkpoints = Trainer(TextRecipe(config), world_of_one()), Checkpoints(path, 60)
    while trainer.steps_done < max(steps):
        trainer.step()
        if trainer.steps_done in steps:
            checkpoints.save(trainer)
    checkpoints.close()
    return trainer


def held(trainer: Trainer) -> Snapshots:
    """What is left of the snapshots of ``trainer`` for ranks that have none."""
    supervisor = Supervisor()
    snapshots_of(supervisor).write(trainer)
    return snapshots_of(supervisor)


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
    other = Trainer(TextRecipe(change(config)), world_of_one())
    before = other.state_sha256()
    with pytest.raises(ContractBroken, match="pass --accept-contract") as refused:
        Checkpoints(tmp_path, 60).restore(other)
    assert f"  {line}" in str(refused.value).splitlines()
    assert other.state_sha256() == before


def test_a_new_contract_can_be_accepted_and_is_told(config, tmp_path):
    old = saved(config, tmp_path, 2)
    micro = replace(config.batch, micro_size=4)
    new = Trainer(TextRecipe(replace(config, batch=micro, accept_contract=True)), world_of_one())
    found = Checkpoints(tmp_path, 60).restore(new)
    assert found is not None
    source, told = found
    assert source.endswith("step-00000002")
    assert "batch.micro_size: 2 in the checkpoint, 4 now" in told["accepted"]
    assert new.state_sha256() == old.state_sha256()


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("betas", [0.0, 0.99], "optimizer.groups.1.betas: [0.0, 0.99] in the checkpoint, [0.9, 0.95] now"),
        ("weight_decay", 9.0, "optimizer.groups.1.weight_decay: 9.0 in the checkpoint, 0.0 now"),
        ("eps", 1.0, "optimizer.groups.1.eps: 1.0 in the checkpoint, 1e-08 now"),
        ("maximize", True, "optimizer.groups.1.maximize: true in the checkpoint, false now"),
    ],
)
def test_forged_options_of_the_optimizer_are_refused_by_name(config, tmp_path, key, value, line):
    """A manifest whose own hash is right: who can write it can hash it."""
    saved(config, tmp_path, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002"
    found = read_manifest(path)
    found.extra["optimizer"]["groups"][1]["options"][key] = value
    (path / MANIFEST_FILE).write_bytes(found.to_bytes())
    trainer = Trainer(TextRecipe(config), world_of_one())
    with pytest.raises(ContractBroken, match="pass --accept-contract") as refused:
        Checkpoints(tmp_path, 60).restore(trainer)
    assert f"  {line}" in str(refused.value).splitlines()


def test_a_forged_learning_rate_is_not_used(config, tmp_path):
    whole = saved(config, tmp_path, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002"
    found = read_manifest(path)
    for group in found.extra["optimizer"]["groups"]:
        group["options"]["lr"] = 1e6
    (path / MANIFEST_FILE).write_bytes(found.to_bytes())
    trainer = Trainer(TextRecipe(config), world_of_one())
    Checkpoints(tmp_path, 60).restore(trainer)
    for each in (whole, trainer):
        each.step()
    assert trainer.state_sha256() == whole.state_sha256()


def test_accepted_options_of_the_optimizer_are_those_of_now(config, tmp_path):
    saved(config, tmp_path, 2)
    other = replace(config, optim=replace(config.optim, betas=(0.5, 0.9)), accept_contract=True)
    trainer = Trainer(TextRecipe(other), world_of_one())
    assert Checkpoints(tmp_path, 60).restore(trainer) is not None
    assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.5, 0.9)}
    assert trainer.steps_done == 2


def test_nothing_is_the_beginning_also_for_who_has_been_elsewhere(config, tmp_path):
    trainer = Trainer(TextRecipe(config), world_of_one())
    before = trainer.state_sha256()
    trainer.step()
    assert trainer.rank_state.holds is Holds.NOTHING  # of a run that others are in
    assert restore_newest(trainer, None, Checkpoints(tmp_path, 60)) == ("the beginning", {})
    assert (trainer.state_sha256(), trainer.steps_done) == (before, 0)
    assert trainer.rank_state.holds is Holds.EVERYTHING


@pytest.mark.parametrize(("in_memory", "source"), [(2, "disk"), (3, "memory"), (4, "memory")])
def test_the_newer_of_memory_and_disk_is_taken(config, tmp_path, in_memory, source):
    saved(config, tmp_path / "run", 3)
    snapshots = held(saved(config, tmp_path / "other", in_memory))
    trainer = Trainer(TextRecipe(config), world_of_one())
    found, _ = restore_newest(trainer, snapshots, Checkpoints(tmp_path / "run", 60))
    assert trainer.steps_done == max(in_memory, 3)
    assert (found == "the snapshot") == (source == "memory")


def test_a_checkpoint_that_cannot_be_trusted_does_not_keep_memory_from_being_used(config, tmp_path):
    saved(config, tmp_path, 1, 4)
    snapshots = held(saved(config, tmp_path / "other", 3))
    weights = tmp_path / CHECKPOINTS / "step-00000004" / MODEL_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    trainer = Trainer(TextRecipe(config), world_of_one())
    assert restore_newest(trainer, snapshots, Checkpoints(tmp_path, 60))[0] == "the snapshot"
    assert trainer.steps_done == 3
    (tmp_path / CHECKPOINTS / "step-00000001" / MODEL_FILE).write_bytes(b"")
    with pytest.raises(CheckpointRejected):
        Checkpoints(tmp_path, 60).restore(trainer)
