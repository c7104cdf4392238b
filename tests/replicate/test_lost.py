"""Ranks that die, leave or never come, on one host and on several: the others learn who it was, and soon."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.errors import Desync, PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.reduce.hierarchical_transport import HierarchicalTransport
from instep.replicate.wrapper import DataParallel
from tests.far import evenly, hosts
from tests.lab import on_each, two_hosts
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, mean_square
from tests.replicate.replicas import assert_backwards, failing_at, gradients, mean_gradients, square
from tests.world import world


def run(model: DataParallel, rank: int, declared: bool) -> None:
    if declared:
        for micro_batch in model.micro_batches(4 * model.group.size // 2):
            mean_square(model, micro_batch, 0)
    else:
        square(model, rank).backward()


def lose(
    path: str, lost: int, declared: bool, backend: str | None = None, in_slices: bool = False, **options: Any
) -> None:
    """Rank ``lost`` dies in its second backward, when the others are in an exchange already, or several."""
    mesh = init(backend=backend, timeout_s=30)
    model = DataParallel(filled(Dense()), process_group=mesh["dp"], bucket_cap_mb=1e-5, **options)
    transport: Any = model._reducer.exchange.transport
    assert isinstance(transport, HierarchicalTransport) == (mesh.world_size == 4)
    if in_slices:
        transport.at_once_bytes = 0
    run(model, mesh.rank, declared)
    model.zero_grad()

    def note_and_die(gradient: torch.Tensor) -> None:
        Path(path, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if mesh.rank == lost:
        model.module.layers[0].weight.register_hook(note_and_die)
    try:
        run(model, mesh.rank, declared)
    except PeerLost as error:
        report = {"text": str(error), "ranks": error.ranks, "operation": error.operation}
        report["at"] = time.monotonic()
        report["grads"] = sum(p.grad is not None for p in model.parameters())
        with pytest.raises(PeerLost, match=r"This group is lost.*wrap model\.module again"):
            model.sync_gradients()
        model.close()
        model = DataParallel(model.module, process_group=world_of_one())
        square(model, 0).backward()
        torch.testing.assert_close(gradients(model.module), mean_gradients(model.module, square, size=1))
        Path(path, f"report {mesh.rank}").write_text(json.dumps(report))
        until = time.monotonic() + 30  # to end would tell the others, too, and rank 0 has the store
        while len(list(Path(path).glob("report *"))) < mesh.world_size - 1 and time.monotonic() < until:
            threading.Event().wait(0.01)


def lose_on_two_hosts(path: str, lost: int, declared: bool) -> None:
    with hosts(*evenly(2, 2)):
        lose(path, lost, declared, "gloo")


def assert_all_name(lost: int, path: Path, size: int = 4) -> None:
    died = float((path / "died").read_text())
    for rank in {*range(size)} - {lost}:
        report = json.loads((path / f"report {rank}").read_text())
        assert report["ranks"] == [lost] and report["grads"] == 0, report
        assert f"rank {lost}" in report["text"], report
        assert report["at"] - died < 15  # half the deadline


@pytest.mark.parametrize(
    ("declared", "options"), [(False, {"strategy": "naive"}), (True, {"in_slices": True})], ids=str
)
def test_a_rank_that_dies_in_an_exchange(tmp_path: Path, declared: bool, options: dict[str, Any]) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(partial(lose, **options), (str(tmp_path), 1, declared), ranks=2, grace_s=30)
    assert_all_name(1, tmp_path, 2)
    report = json.loads((tmp_path / "report 0").read_text())
    assert report["operation"].startswith("the exchange of bucket")
    assert "rank 1 (pid" in report["text"] and "died: rank 0 waited" in report["text"]


@pytest.fixture
def rank_zero_has_noticed() -> threading.Event:
    return threading.Event()


@world(2, timeout_s=2)
def test_a_rank_that_never_synchronises_is_found_by_the_deadline(mesh: Mesh, rank_zero_has_noticed) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    if mesh.rank == 0:
        began = time.monotonic()
        with pytest.raises(
            PeerLost, match=r"^after 0 optimizer steps: rank 0 waited .* never came: rank 1"
        ) as failure:
            square(model, 0).backward()
        assert 0.4 < time.monotonic() - began < 30  # no other deadline is as short
        assert failure.value.operation == "the exchange of bucket 0"
        assert failure.value.ranks == (1,)
        with pytest.raises(PeerLost, match=r"This group is lost: close"):
            square(model, 0).backward()
        rank_zero_has_noticed.set()
    assert rank_zero_has_noticed.wait(30)
    model.close()


@world(2, timeout_s=2)
@pytest.mark.parametrize("left", [False, True])
def test_what_a_terminal_shows_last_says_who_was_lost_and_what_to_do(
    mesh: Mesh, left: bool, rank_zero_has_noticed
) -> None:
    """It stood above the stacks of all ranks, below that of the lane and the same error three times."""
    model = DataParallel(filled(Dense()), process_group=mesh)
    square(model, mesh.rank).backward()
    if mesh.rank == 0:
        for again in (False, True):  # an error that is kept grew with everyone who raised it
            with pytest.raises(PeerLost) as lost:
                square(model, 0).backward()
            shown = "".join(traceback.format_exception(lost.value))
            assert shown.count("Traceback (most recent call last)") == 1
            assert sum(line.startswith("  File") for line in shown.splitlines()) < 12
            last = shown.splitlines()[-1]
            assert "This group is lost" in last if again else "the exchange of bucket 0" in last
        rank_zero_has_noticed.set()
    if mesh.rank == 0 or not left:
        assert rank_zero_has_noticed.wait(30)
    model.close()


@world(2, timeout_s=2)
def test_a_rank_that_does_not_come_to_be_wrapped_is_found_too(mesh: Mesh) -> None:
    if mesh.rank == 0:
        with pytest.raises(
            PeerLost, match=r"wrapping a model .* one of them never came: do it on every rank"
        ):
            DataParallel(filled(Dense()), process_group=mesh)


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
        launch(lose_on_two_hosts, (str(tmp_path), lost, declared), ranks=4, grace_s=30)
    assert_all_name(lost, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", range(4))
def test_a_rank_that_dies_is_named_on_the_other_side_of_a_link(tmp_path: Path, lost: int) -> None:
    """Also if it held the store, in which the ranks of its host would tell those of the other one."""
    with two_hosts() as lab, pytest.raises(RankFailed, match=rf"rank {lost} of 4 .* was killed by SIGKILL"):
        on_each(lab, partial(lose, str(tmp_path), lost, True, "gloo"), per_host=2)
    assert_all_name(lost, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_lines_of_all_ranks_stand_in_the_error_of_one(backend: str) -> None:
    """Each rank was told in which step the others were, but not from which line of the program it came."""
    world(3, backend=backend)(skips_an_optimizer_step)()


def skips_an_optimizer_step(mesh: Mesh) -> None:
    model = DataParallel(torch.nn.Linear(2, 1), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    if mesh.rank != 1:
        optimizer.step()
    optimizer.zero_grad()
    backward = lonely if mesh.rank == 1 else together
    with pytest.raises(Desync) as told:
        backward(model)
    model.close()
    sentence, *table = str(told.value).splitlines()
    assert "rank 1 is at optimizer step 0; ranks 0, 2: 1" in sentence
    if mesh.rank:
        assert not table and sentence.endswith(". Rank 0 shows where each rank stands")
        return
    head, *rows, last = table
    assert last.startswith("rank 1 is out of step. Each rank must call optimizer.step()")
    assert head.split() == ["rank", "where", "number", "shape", "site", "seconds", "state"]
    sites = {int(row.split()[0]): row for row in rows}
    assert sorted(sites) == [0, 1, 2]
    assert sites[1].endswith(" lonely") or " lonely " in sites[1]
    assert all(" together " in sites[rank] for rank in (0, 2))
    assert all("in the exchange of bucket 0" in row or "after the exchange" in row for row in rows)


def lonely(model):
    model(torch.ones(1, 2)).sum().backward()


def together(model):
    model(torch.ones(1, 2)).sum().backward()
