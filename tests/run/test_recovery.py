"""What a run goes on from: the newest state that can be trusted, under the contract of its beginning.

What ranks were given when they met is no edit of one of them. Otherwise all would hash all that they hold in
the first exchange after each recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import instep
from instep.checkpoint.load import read_manifest
from instep.checkpoint.manifest import MANIFEST_FILE
from instep.checkpoint.save import MODEL_FILE
from instep.errors import CheckpointRejected, ContractBroken, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.recipes.text_config import Config
from instep.record.directory import CHECKPOINTS
from instep.run.rank_state import Holds
from instep.run.recovery import Checkpoints, Snapshots, restore_newest, send, take
from instep.run.script_training import ScriptTraining
from instep.step import replica_watch
from tests.parity import world_of_one
from tests.replicate.test_drift import Loop
from tests.run.snapshots import Supervisor, snapshots_of
from tests.run.text_training import STEPS, TextTraining, tiny, trained
from tests.world import world


@pytest.fixture
def config(data: Path) -> Config:
    return tiny(data, steps=9)


def alone(config: Config) -> TextTraining:
    """One that has made no step."""
    return TextTraining(config, world_of_one())


def saved(config: Config, path: Path, *steps: int) -> TextTraining:
    """One that has made the last of ``steps``, and saved after each of them."""
    mine, checkpoints = alone(config), Checkpoints(path, 60)
    for step in range(1, max(steps) + 1):
        mine.step()
        if step in steps:
            checkpoints.save(mine.training)
    checkpoints.close()
    return mine


def held(training: ScriptTraining) -> Snapshots:
    """What is left of the snapshots of ``training`` for ranks that have none."""
    supervisor = Supervisor()
    snapshots_of(supervisor).write(training)
    return snapshots_of(supervisor)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda c: replace(c, model=replace(c.model, tied=False)),
            "model.tied: true in the checkpoint, false now",
        ),
        (lambda c: replace(c, seed=5), "seed: 0 in the checkpoint, 5 now"),
    ],
    ids=["layer", "seed"],
)
def test_another_contract_is_refused_by_name(
    config: Config, tmp_path: Path, change: Callable[[Config], Config], line: str
) -> None:
    saved(config, tmp_path, 2)
    other = alone(change(config)).training
    before = other.state_sha256()
    with pytest.raises(ContractBroken, match="was begun with other settings; restore these") as refused:
        Checkpoints(tmp_path, 60).restore(other)
    assert f"  {line}" in str(refused.value).splitlines()
    assert other.state_sha256() == before


def test_another_machine_can_be_accepted_and_changed_code_is_noted(config, tmp_path):
    old = saved(config, tmp_path, 2).training
    changed = {"libc": "another", "script.code": "another", "steps": 1000}
    new = alone(config).training
    new.contract.update(changed)
    with pytest.raises(ContractBroken, match=r"(?s)where the bits may differ.*--accept-contract.*  libc: "):
        Checkpoints(tmp_path, 60).restore(new)
    new = alone(replace(config, accept_contract=True)).training
    new.contract.update(changed)
    found = Checkpoints(tmp_path, 60).restore(new)
    assert found is not None and found[0].endswith("step-00000002")
    accepted = [line.partition(":")[0] for line in found[1]["accepted"]]
    assert accepted == ["libc", "script.code has changed", "steps"]
    assert "note: script.code has changed" in found[1]["notes"]
    assert new.state_sha256() == old.state_sha256()


def test_a_forged_learning_rate_is_not_used(config, tmp_path):
    whole = saved(config, tmp_path, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002"
    found = read_manifest(path)
    for group in found.extra["optimizer"]["groups"]:
        group["options"]["lr"] = 1e6
    (path / MANIFEST_FILE).write_bytes(found.to_bytes())
    other = alone(config)
    Checkpoints(tmp_path, 60).restore(other.training)
    for each in (whole, other):
        each.step()
    assert other.training.state_sha256() == whole.training.state_sha256()


def test_until_a_step_is_made_the_beginning_is_what_was_built(config, tmp_path):
    mine = TextTraining(config)
    training = mine.training
    for _ in range(2):
        mine.join(world_of_one())
        assert restore_newest(training, None, Checkpoints(tmp_path, 60)) == ("the beginning", {})
        assert training.state_sha256() == alone(config).training.state_sha256()
        assert training.rank_state.holds is Holds.EVERYTHING
        with torch.no_grad():
            next(mine.module.parameters()).add_(1)
        training.rank_state.restoring()  # as where a rank was lost in the update
        mine.leave()


def test_after_it_there_is_no_beginning_any_more(config, tmp_path):
    mine = TextTraining(config)
    mine.join(world_of_one())
    mine.agree()
    mine.step()
    mine.training.rank_state.restoring()
    with pytest.raises(CheckpointRejected, match="no rank has the run's state, and there is"):
        restore_newest(mine.training, None, Checkpoints(tmp_path, 60))


@pytest.mark.parametrize("stage", [0, 1])
@world(2)
def test_what_ranks_have_built_otherwise_is_that_of_the_first_or_refused(
    mesh: Mesh, data: Path, stage: int
) -> None:
    """Each keeps its shards of its own, where the state is divided."""
    mine = TextTraining(tiny(data, stage=stage))
    with torch.no_grad():
        next(mine.module.parameters()).add_(mesh.rank)
    mine.training.keep()
    mine.join(mesh)
    if stage:
        with pytest.raises(ContractBroken, match="rank 1 has built a model with other values than rank 0"):
            mine.agree()
    else:
        mine.agree()
        assert mine.training.state_sha256() == alone(tiny(data)).training.state_sha256()


@pytest.mark.parametrize(("in_memory", "source"), [(2, "disk"), (3, "memory"), (4, "memory")])
def test_the_newer_of_memory_and_disk_is_taken(config, tmp_path, in_memory, source):
    saved(config, tmp_path / "run", 3)
    snapshots = held(saved(config, tmp_path / "other", in_memory).training)
    training = alone(config).training
    found, _ = restore_newest(training, snapshots, Checkpoints(tmp_path / "run", 60))
    assert training.steps_done == max(in_memory, 3)
    assert (found == "the snapshot") == (source == "memory")


def test_a_checkpoint_that_cannot_be_trusted_does_not_keep_memory_from_being_used(config, tmp_path):
    saved(config, tmp_path, 1, 4)
    snapshots = held(saved(config, tmp_path / "other", 3).training)
    weights = tmp_path / CHECKPOINTS / "step-00000004" / MODEL_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    training = alone(config).training
    assert restore_newest(training, snapshots, Checkpoints(tmp_path, 60))[0] == "the snapshot"
    assert training.steps_done == 3
    (tmp_path / CHECKPOINTS / "step-00000001" / MODEL_FILE).write_bytes(b"")
    with pytest.raises(CheckpointRejected):
        Checkpoints(tmp_path, 60).restore(training)


def test_a_state_goes_through_a_snapshot_into_a_process_that_is_new(config):
    guarded = replace(config, checks=replace(config.checks, spike=3.0))
    old, new = trained(guarded, world_of_one()), alone(guarded)
    snapshots = held(old.training)
    assert snapshots.newest() == (STEPS, 1)
    snapshots.restore(new.training, *snapshots.newest())
    assert new.training.state_sha256() == old.training.state_sha256()
    assert new.training.last == old.training.last
    assert new.training.health.state() == old.training.health.state()
    assert new.data.position == old.data.position == STEPS * config.batch.global_size
    assert new.step().norm == old.step().norm


def given(training: ScriptTraining, reference: ScriptTraining) -> None:
    """``training`` has the state of ``reference``, as one that it has brought along."""
    snapshots = held(reference)
    take(training, snapshots.opened(*snapshots.newest()))


@world(3)
def test_the_newest_state_wins_wherever_it_is(mesh: Mesh, data: Path) -> None:
    reference = trained(tiny(data), world_of_one())
    mine = TextTraining(tiny(data), mesh)
    training = mine.training
    if mesh.rank == 1:
        given(training, reference.training)
        training.rank_state.agreed(complete=True)
    elif mesh.rank == 2:
        training.rank_state.restoring()  # a survivor whose state is whole nowhere
        with torch.no_grad():
            next(mine.module.parameters()).add_(1)
    assert mine.agree() == "a survivor"
    assert training.steps_done == STEPS
    training.compare_replicas()
    assert mine.step().loss == reference.step().loss
    assert training.state_sha256() == reference.training.state_sha256()


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
