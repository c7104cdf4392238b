"""``instep.load`` on several ranks: all have the same state afterwards, or all raise and none has changed."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected, PeerLost
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.checkpoint.nets import made, named, train, whole_hash
from tests.world import world

STEPS = (2, 5)


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """One directory per rank with the same checkpoints, and the hash of the newest is in ``newest_hash``."""
    model, optimizer = made(0)
    for step in STEPS:
        train(model, optimizer, range(step))
        save(tmp_path / "disk-0", step=step, model=model, optimizer=optimizer)
    for rank in (1, 2):
        shutil.copytree(tmp_path / "disk-0", tmp_path / f"disk-{rank}")
    return [tmp_path / f"disk-{rank}" for rank in range(3)]


def newest_hash(disk: Path) -> str:
    model, optimizer = made(7)
    load(disk, model=model, optimizer=optimizer)
    return whole_hash(model, optimizer)


def wrapped(mesh: Mesh, seed: int = 3) -> tuple[DataParallel, nn.Module, Optimizer]:
    module, optimizer = made(seed)
    return DataParallel(module, process_group=mesh), module, optimizer


def step_of(disk: Path, step: int) -> Path:
    return disk / f"step-{step:08d}"


def flip(disk: Path) -> None:
    file = step_of(disk, 5) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def flip_all(disk: Path) -> None:
    flip(disk)
    shutil.rmtree(step_of(disk, 2))


def leave_older(disk: Path) -> None:
    shutil.rmtree(step_of(disk, 5))


def save_another(disk: Path) -> None:
    shutil.rmtree(disk)
    save(disk, step=5, **named(*made(1)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leave_older, r"rank 1: step 2 in \S+step-00000002, manifest [0-9a-f]{12}\n"),
        (
            flip,
            r"rank 1: step 2 in \S+, manifest [0-9a-f]{12}, passed over \S+: expected sha256",
        ),
        (flip_all, r"rank 1: \S+: expected a checkpoint that verifies, got 1 that do not"),
        (save_another, r"rank 1: step 5 in \S+disk-1/step-00000005, manifest [0-9a-f]{12}\n"),
    ],
)
def test_ranks_that_have_different_checkpoints_all_refuse(
    disks: list[Path], damage: Callable[[Path], None], words: str
) -> None:
    @world(3)
    def body(mesh: Mesh) -> None:
        model, module, optimizer = wrapped(mesh)
        before = whole_hash(module, optimizer)
        with pytest.raises(CheckpointRejected, match="give all ranks one directory") as told:
            load(disks[mesh.rank], model=model, optimizer=optimizer)
        if mesh.rank:
            assert str(told.value).endswith("(rank 0 says which)") and told.value.told
        else:
            for found in (words, r"rank 0: step 5 in \S+disk-0", r"rank 2: step 5 in \S+disk-2"):
                assert re.search(found, str(told.value))
        assert whole_hash(module, optimizer) == before
        model.close()

    damage(disks[1])
    body()


@pytest.mark.parametrize(
    ("has", "backend"), [((0,), "shm"), ((2,), "gloo"), ((0, 2), "shm"), ((0, 1, 2), "gloo")]
)
def test_a_rank_without_any_checkpoint_is_sent_what_the_others_have(
    disks: list[Path], has: tuple[int, ...], backend: str
) -> None:
    expected = newest_hash(disks[0])
    for rank in {0, 1, 2} - set(has):
        shutil.rmtree(disks[rank])
    stale = r"rank 0 has none in \S+disk-0, so all ranks resume from what rank 2 has: step 5 in \S+disk-2"

    @world(3, backend=backend)
    def body(mesh: Mesh) -> None:
        model, module, optimizer = wrapped(mesh)
        resumed = load(disks[mesh.rank], model=model, optimizer=optimizer)
        assert resumed.step == 5
        owner = mesh.rank if mesh.rank in has else has[0]
        assert resumed.path == step_of(disks[owner], 5)
        assert resumed.differences == resumed.rejected == ()
        assert whole_hash(module, optimizer) == expected
        assert model.next_step == 5
        model.close()

    with pytest.warns(UserWarning, match=stale) if 0 not in has else nullcontext():
        body()


def test_a_damaged_checkpoint_on_one_disk_is_told_by_rank_zero_where_all_go_back(disks: list[Path]) -> None:
    for disk in disks[:2]:
        flip(disk)
    leave_older(disks[2])

    @world(3)
    def body(mesh: Mesh) -> None:
        model, _, optimizer = wrapped(mesh)
        assert load(disks[mesh.rank], model=model, optimizer=optimizer).step == 2
        model.close()

    with pytest.warns(UserWarning, match=r"went back to step 2 in \S+disk-0") as warned:
        body()
    lines = [str(warning.message) for warning in warned]
    assert len(lines) == 2  # of rank 0 alone: each rank has a path of its own
    for rank, line in enumerate(lines):
        assert f"the newest checkpoint of rank {rank} was refused" in line
        assert f"disk-{rank}/step-00000005/model.safetensors: expected sha256" in line


def test_another_optimizer_on_one_rank_is_refused_on_all_and_nothing_changed(
    disks: list[Path],
) -> None:
    @world(2)
    def body(mesh: Mesh) -> None:
        model, module, optimizer = wrapped(mesh)
        if mesh.rank:
            optimizer = AdamW([{"params": [p]} for p in module.parameters()])
        before = whole_hash(module, optimizer)
        with pytest.raises(CheckpointRejected, match="expected 1 parameter groups, got"):
            load(disks[mesh.rank], model=model, optimizer=optimizer)
        assert whole_hash(module, optimizer) == before
        model.close()

    body()


def test_a_rank_that_loads_alone_is_told_in_which_operation_it_waits(disks: list[Path]) -> None:
    have_ended = threading.Barrier(2)  # what is closed by one is no more waited for by the other

    @world(2, timeout_s=2)
    def body(mesh: Mesh) -> None:
        model, _, optimizer = wrapped(mesh)
        if mesh.rank == 0:
            with pytest.raises(PeerLost, match="in the loading of a checkpoint"):
                load(disks[0], model=model, optimizer=optimizer)
        else:
            with pytest.raises(PeerLost, match="rank 0"):
                model(torch.ones(2, 4)).sum().backward()
        have_ended.wait(30)
        model.close()

    body()


def test_a_module_without_a_wrapper_and_a_closed_wrapper_load_for_themselves(disks: list[Path]) -> None:
    expected = newest_hash(disks[0])

    @world(2)
    def body(mesh: Mesh) -> None:
        model, module, optimizer = wrapped(mesh)
        model.close()
        if mesh.rank == 0:
            load(disks[0], model=module, optimizer=optimizer)
            assert whole_hash(module, optimizer) == expected
        if mesh.rank == 1:
            load(disks[1], model=model, optimizer=optimizer)
            assert whole_hash(module, optimizer) == expected

    body()


def test_all_see_what_rank_zero_has_just_saved(tmp_path: Path) -> None:
    """A rank that does not write returns from ``save`` at once, and must not look before it is there."""

    @world(3)
    def body(mesh: Mesh) -> None:
        model, _, optimizer = wrapped(mesh)
        for step in range(1, 4):
            save(tmp_path, step=step, model=model, optimizer=optimizer)
            assert load(tmp_path, model=model, optimizer=optimizer).step == step
        model.close()

    body()
