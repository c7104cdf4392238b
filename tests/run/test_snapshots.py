"""Snapshots of a divided state: from the ranks of one generation to those of the next, however many."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import save as saving
from instep.checkpoint.load import newest
from instep.elastic.snapshot import Snapshot, SnapshotHandle
from instep.mesh.mesh import Mesh
from instep.record.directory import CHECKPOINTS
from instep.run.recovery import Checkpoints, restore_newest
from tests.parity import world_of_one
from tests.run.snapshots import Supervisor, snapshots_of
from tests.run.text_training import TextTraining, tiny
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time


def in_shards(mesh: Mesh, data: Path) -> TextTraining:
    return TextTraining(tiny(data, stage=1, steps=9), mesh)


_references: dict[bytes, list[str]] = {}
_lock = threading.Lock()
LAST = 5  # of the steps that a test asks for


def reference(data: Path, steps: int) -> str:
    """The state after ``steps`` that are made without any sharding, once for all who ask."""
    text = data.read_bytes()
    with _lock:
        if text not in _references:
            whole = TextTraining(tiny(data, steps=9), world_of_one())
            _references[text] = [whole.training.state_sha256()]
            for _ in range(LAST):
                whole.step()
                _references[text].append(whole.training.state_sha256())
        return _references[text][steps]


def copied(mesh: Mesh, data: Path, supervisor: Supervisor, path: Path, steps: Sequence[int]) -> None:
    """A generation that goes on from what there is, and copies its state after each of ``steps``."""
    mine, memory = in_shards(mesh, data), snapshots_of(supervisor)
    mesh.world.group.barrier("the test")  # all have taken over
    restore_newest(mine.training, memory, Checkpoints(path, 20))
    while mine.training.steps_done < steps[-1]:
        mine.step()
        if mine.training.steps_done in steps:
            memory.write(mine.training)
    mesh.world.group.barrier("the test")
    mine.leave()


def restored(
    mesh: Mesh, data: Path, supervisor: Supervisor, path: Path, step: int, source: str = "the snapshot"
) -> None:
    """A generation that finds the state after ``step``, and makes another."""
    mine = in_shards(mesh, data)
    training = mine.training
    if source != "the beginning":
        with torch.no_grad():
            next(mine.module.parameters()).add_(1)  # as if it were from elsewhere, or newer
    assert restore_newest(training, snapshots_of(supervisor), Checkpoints(path, 20))[0].endswith(source)
    assert training.steps_done == step
    assert training.state_sha256() == reference(data, step)
    if source == "the snapshot":
        assert training.last is not None  # how the step went that is to be written down
    mine.step()
    assert training.state_sha256() == reference(data, step + 1)
    mine.leave()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_any_number_of_ranks_goes_on_from_the_copies_of_any_other(
    data: Path, tmp_path: Path, before: int, after: int
) -> None:
    supervisor = Supervisor()
    world(before)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(1, 3))
    assert len(supervisor.kept) == before
    world(after)(restored)(data=data, supervisor=supervisor, path=tmp_path, step=3)


def test_all_copies_together_are_the_state_once(data: Path, tmp_path: Path) -> None:
    supervisor, alone = Supervisor(), Supervisor()
    world(3)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(1,))
    world(1)(copied)(data=data, supervisor=alone, path=tmp_path, steps=(1,))
    sizes = [kept_bytes(kept) for kept in supervisor.all]
    (whole,) = [kept_bytes(kept) for kept in alone.all]
    assert whole <= sum(sizes) <= 1.1 * whole  # but for padding, each tensor's and each copy's
    assert max(sizes) < 0.5 * whole


def kept_bytes(kept: SnapshotHandle) -> int:
    return Snapshot.attach(kept.place).tensor_bytes


def test_a_copy_that_was_torn_takes_all_ranks_back_to_the_step_before(data: Path, tmp_path: Path) -> None:
    """Killed in the middle of the copy of step 3, when another rank may have ended its own."""
    supervisor = Supervisor()
    world(3)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(2, 3))
    copy = Snapshot.attach(supervisor.kept[1, 2].place)
    half = copy.halves[3]
    copy._words.post(3 + half, 0)
    copy.bytes_of(half, 0, copy.tensor_bytes).fill_(255)
    world(2)(restored)(data=data, supervisor=supervisor, path=tmp_path, step=2)
    supervisor.generation = 2
    world(3)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(3,))
    halves = [sorted(Snapshot.attach(kept.place).halves) for kept in supervisor.all]
    assert halves == [[2, 3]] * 3  # the next copy goes where none was that all have


def test_a_generation_goes_on_in_the_copies_of_the_one_before(data: Path, tmp_path: Path) -> None:
    supervisor = Supervisor()
    world(2)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(1, 2))
    before = supervisor.all
    supervisor.generation = 2
    world(2)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(4,))
    assert supervisor.all == before  # nothing new was handed over
    world(2)(restored)(data=data, supervisor=supervisor, path=tmp_path, step=4)


def test_copies_of_a_generation_that_was_lost_before_all_had_one_do_not_count(
    data: Path, tmp_path: Path
) -> None:
    supervisor = Supervisor()
    world(3)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(2,))
    supervisor.generation = 2
    world(2)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(4,))
    assert len(supervisor.kept) == 5
    del supervisor.kept[2, 1]  # the second rank was killed before
    world(2)(restored)(data=data, supervisor=supervisor, path=tmp_path, step=2)


def test_moments_that_come_late_do_not_take_the_step_before_away(data: Path, tmp_path: Path) -> None:
    """A larger copy is begun with what the smaller one had, because others may not have theirs yet."""
    supervisor = Supervisor()
    world(2)(copied)(data=data, supervisor=supervisor, path=tmp_path, steps=(1,))
    small = Snapshot.attach(supervisor.kept[1, 0].place)
    larger = small.grown(2 * small._words[1], 2 * small.tensor_bytes)
    supervisor.hand_over(larger, 0, 2, 1)
    world(3)(restored)(data=data, supervisor=supervisor, path=tmp_path, step=1)


@world(2)
def test_of_a_state_that_every_rank_has_rank_zero_alone_has_a_snapshot(mesh: Mesh, data: Path) -> None:
    supervisor = Supervisor()
    mine, memory = TextTraining(tiny(data), mesh), snapshots_of(supervisor)
    restore_newest(mine.training, memory, Checkpoints(data.parent / "nothing", 20))
    mine.work.wishes = {"copy": lambda: memory.due(mine.training)}
    mine.step()
    memory.after_step(mine.training, 0.1)
    assert list(supervisor.kept) == ([(1, 0)] if mesh.rank == 0 else [])
    mine.leave()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_is_written_from_a_snapshot_that_no_later_one_touches(
    data: Path, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), saving.write

    def write_later(*args: Any) -> Path:
        assert gate.wait(20)
        return write(*args)

    monkeypatch.setattr(saving, "write", write_later)
    world(num_ranks)(saved_beside_steps)(data=data, path=tmp_path, gate=gate)
    found = newest(tmp_path / CHECKPOINTS)
    assert found is not None and found.manifest.state_sha256 == reference(data, 2)
    world(3)(restored)(data=data, supervisor=Supervisor(), path=tmp_path, step=2, source="step-00000002")


def saved_beside_steps(mesh: Mesh, data: Path, path: Path, gate: threading.Event) -> None:
    mine, memory = in_shards(mesh, data), snapshots_of(Supervisor())
    training, checkpoints = mine.training, Checkpoints(path, 20, snapshots=memory)
    restore_newest(training, memory, checkpoints)
    mine.steps(2)
    checkpoints.save(training)
    assert checkpoints._saver._memory.tensor.numel() == 0
    assert mesh.rank or memory.due(training)
    mine.step()
    memory.write(training)
    assert not memory.due(training)  # until the other half has been read
    mine.step()
    memory.write(training)  # as a generation does that begins meanwhile
    gate.set()
    checkpoints.finish(training)
    assert mesh.rank or memory.due(training)
    mine.leave()


def test_a_save_of_an_earlier_generation_reads_its_half_to_the_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation saved the same step again, forgot the first save, and wrote into what that read:
    its checkpoint had the weights of a later step, and verified."""
    gates, write, calls = [threading.Event(), threading.Event()], saving.write, itertools.count()

    def write_later(*args: Any) -> Path:
        assert gates[next(calls)].wait(20)
        return write(*args)

    monkeypatch.setattr(saving, "write", write_later)
    supervisor = Supervisor()
    mine, memory = in_shards(world_of_one(), data), snapshots_of(supervisor)
    first, second = (Checkpoints(tmp_path, 20, snapshots=memory) for _ in range(2))
    restore_newest(mine.training, memory, first)
    mine.steps(2)
    first.save(mine.training)
    first.give_up()  # a rank is lost
    memory.take_over(supervisor.all)
    restore_newest(mine.training, memory, second)
    second.save(mine.training)
    mine.step()
    memory.write(mine.training)
    gates[0].set()
    first.close()
    gates[1].set()
    second.close()
    found = newest(tmp_path / CHECKPOINTS)
    assert found is not None and found.manifest.state_sha256 == reference(data, 2)
    mine.leave()
