"""Data-parallel ranks on several hosts, several on each: the bits of one, and who is lost is named."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instep.errors import Desync, PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.reduce.hierarchical_transport import HierarchicalTransport
from instep.reduce.transport import GlooTransport
from instep.replicate.wrapper import DataParallel
from tests.far import evenly, hosts
from tests.lab import on_each, two_hosts
from tests.parity import assert_bits_of_one, filled, world_of_one
from tests.replicate.nets import RANDOM, Dense, mean_square
from tests.replicate.replicas import assert_backwards, failing_at, square
from tests.world import world

TINY_MB = 1e-4


def test_plain_loops_and_steps_that_are_given_up_go_on():
    with hosts(*evenly(2, 2)):
        world(4)(goes_on_after_a_step_that_was_given_up)()


def goes_on_after_a_step_that_was_given_up(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    assert isinstance(model._reducer.exchange.transport, HierarchicalTransport)
    assert_backwards(mesh, model, times=2)
    if mesh.rank == 3:
        weight = model.module.layers[0].weight
        with failing_at(weight, ArithmeticError), pytest.raises(ArithmeticError):
            square(model, mesh.rank).backward()
        model.zero_grad()
        square(model, mesh.rank)  # gives the step up
    else:
        with pytest.raises(Desync, match="rank 3 left step 0"):
            square(model, mesh.rank).backward()
    model.zero_grad()
    assert_backwards(mesh, model, times=2)
    model.close()


def test_a_group_is_made_anew_of_the_hosts_that_there_are_then():
    """A model that is bound again sees other hosts, or one rank alone."""
    world(4)(binds_again)()


def binds_again(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    assert type(model._reducer.exchange.transport) is GlooTransport
    assert_backwards(mesh, model)
    mesh.world.group.barrier("the test")
    with hosts(*evenly(2, 2)):
        mesh.world.group.barrier("the test")
        model.close()
        model = DataParallel(model.module, process_group=mesh)
        assert isinstance(model._reducer.exchange.transport, HierarchicalTransport)
        assert_backwards(mesh, model)
        mesh.world.group.barrier("the test")
    model.close()
    model = DataParallel(model.module, process_group=world_of_one())
    assert_backwards(world_of_one(), model)


@world(4, by="process")
def test_processes_of_a_group_that_torch_has_made_give_the_bits_of_one(mesh: Mesh) -> None:
    """With random numbers too, of which threads share the generator."""
    with hosts(*evenly(2, 2)):
        model = DataParallel(filled(Dense()), process_group=dist.group.WORLD)
        assert isinstance(model._reducer.exchange.transport, HierarchicalTransport)
        assert_backwards(mesh, model)
        model.close()
        for training in RANDOM.values():
            assert_bits_of_one(mesh, training, bucket_cap_mb=TINY_MB)


def lose_one_of_four(path: str, lost: int, declared: bool) -> None:
    with hosts(*evenly(2, 2)):
        lose_one(path, lost, declared)


def lose_one(path: str, lost: int, declared: bool = True) -> None:
    """Rank ``lost`` dies in its second backward, when the others are in an exchange already."""
    mesh = init(backend="gloo", timeout_s=30)
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    assert isinstance(model._reducer.exchange.transport, HierarchicalTransport)
    run = declared_step if declared else undeclared_step
    run(model, mesh.rank)
    model.zero_grad()
    if mesh.rank == lost:

        def note_and_die(gradient: torch.Tensor) -> None:
            Path(path, "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        model.module.layers[0].weight.register_hook(note_and_die)
    try:
        run(model, mesh.rank)
    except PeerLost as error:
        report = {"text": str(error), "ranks": error.ranks, "at": time.monotonic()}
        Path(path, f"report {mesh.rank}").write_text(json.dumps(report))
        until = time.monotonic() + 30  # to end would tell the others, too, and rank 0 has the store
        while len(list(Path(path).glob("report *"))) < 3 and time.monotonic() < until:
            threading.Event().wait(0.01)


def undeclared_step(model: DataParallel, rank: int) -> None:
    square(model, rank).backward()


def declared_step(model: DataParallel, rank: int) -> None:
    for micro_batch in model.micro_batches(8):
        mean_square(model, micro_batch, 0)


@pytest.mark.parametrize(
    ("lost", "declared"),
    [
        pytest.param(lost, declared, marks=[pytest.mark.slow] * (lost in (1, 2) and declared == (lost == 1)))
        for lost in range(4)
        for declared in (False, True)
    ],
)
def test_a_rank_that_dies_is_named_on_every_host(tmp_path: Path, lost: int, declared: bool) -> None:
    with pytest.raises(RankFailed, match=rf"rank {lost} of 4 .* was killed by SIGKILL"):
        launch(lose_one_of_four, (str(tmp_path), lost, declared), ranks=4, grace_s=30)
    assert_all_name(lost, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", range(4))
def test_a_rank_that_dies_is_named_on_the_other_side_of_a_link(tmp_path: Path, lost: int) -> None:
    """Also if it held the store, in which the ranks of its host would tell those of the other one."""
    with two_hosts() as lab, pytest.raises(RankFailed, match=rf"rank {lost} of 4 .* was killed by SIGKILL"):
        on_each(lab, partial(lose_one, str(tmp_path), lost), per_host=2)
    assert_all_name(lost, tmp_path)


def assert_all_name(lost: int, path: Path) -> None:
    died = float((path / "died").read_text())
    for rank in {*range(4)} - {lost}:
        report = json.loads((path / f"report {rank}").read_text())
        assert report["ranks"] == [lost], report
        assert f"rank {lost}" in report["text"], report
        assert report["at"] - died < 15  # half the deadline
