"""A mesh without ranks yet, axes that nothing uses, and numbers of threads that differ."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import instep
from instep.mesh import mesh as current
from instep.mesh.join import await_rank
from instep.mesh.mesh import Mesh
from instep.net import device
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled
from tests.replicate.nets import Dense, mean_square
from tests.world import world


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = await_rank(lambda: 3, 4)
    yield made
    made.close()


@pytest.mark.parametrize("what", ["rank", "grank", "ws", "pg"])
def test_a_place_among_others_is_not_known_yet(what: str, mesh: Mesh) -> None:
    with pytest.raises(
        ValueError, match="no rank yet: under `instep run` ranks are assigned where the loop over"
    ):
        instep.get(what)


def test_device_and_place_on_the_host_are_known(mesh: Mesh) -> None:
    assert (instep.get("device"), instep.get("lrank")) == (torch.device("cpu"), 3)
    assert str(mesh) == "<mesh of a process without a rank yet>"


def test_a_spare_asks_for_its_place_when_the_program_asks_for_the_device(monkeypatch) -> None:
    """A CUDA context before that would take memory of a GPU on which another process trains."""
    calls: list[object] = []
    monkeypatch.setattr(device, "num_gpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)

    def place() -> int:
        calls.append("place")
        return 2

    mesh = await_rank(place, 4)
    assert (str(mesh), calls) == ("<mesh of a process without a rank yet>", [])
    assert mesh.device == mesh["dp"].device == torch.device("cuda", 2)
    assert calls == ["place", torch.device("cuda", 2)]
    mesh.close()
    on_cpu = await_rank(place, 4, device="cpu")
    assert on_cpu.device.type == "cpu"
    assert len(calls) == 2
    on_cpu.close()


def server(module: nn.Module) -> ParameterServer:
    return ParameterServer(module, torch.optim.SGD(module.parameters(), 0.1))


def sharded_optimizer(module: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)


USERS: list[Callable[[nn.Module], object]] = [DataParallel, server, sharded_optimizer, fully_shard]


def refused_by_all(mesh: Mesh, written: str, unused: str) -> None:
    current.get.register_mesh(mesh)
    for use in USERS:
        with pytest.raises(ValueError, match=rf"{written}.* nothing would use {unused}, .*init\(dp=-1\), or"):
            use(nn.Linear(3, 2))
    current.get.register_mesh(None)


@world(2, pp=2)
def test_a_pipeline_axis_without_a_pipeline_is_refused_by_all_that_replicate_or_shard(mesh: Mesh) -> None:
    refused_by_all(mesh, r"pp\(2\) = 2 ranks", "pp")


@world(4, shard=2, tp=2)
def test_so_is_a_tensor_axis_beside_one_that_is_used(mesh: Mesh) -> None:
    refused_by_all(mesh, r"shard\(2\) \* tp\(2\) = 4 ranks", "tp")


@world(2, pp=2)
def test_a_mesh_or_an_axis_that_is_named_is_taken(mesh: Mesh) -> None:
    for given, size in ((mesh, 1), (mesh["dp"], 1), (mesh["pp"], 2)):
        model = DataParallel(nn.Linear(3, 2), process_group=given)
        assert model.group.size == size
        model.close()
    current.get.register_mesh(mesh["pp"])
    model = DataParallel(nn.Linear(3, 2))
    assert model.group.size == 2
    model.close()
    current.get.register_mesh(None)


@world(2, by="process")
def test_ranks_with_other_numbers_of_threads_are_named_once_on_rank_0(mesh: Mesh) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if mesh.rank else 1)
    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        lambda module: DataParallel(module, process_group=mesh),
        lambda module: fully_shard(module, process_group=mesh),
    ]
    try:
        for wrap in wrappers:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                wrap(filled(Dense())).close()
            expected = ["ranks compute with 1 threads on rank 0, but 2 threads on rank 1"]
            assert [str(warning.message).split(":")[0] for warning in found] == expected[mesh.rank :]
    finally:
        torch.set_num_threads(before)


def declared_steps(num_steps: int, num_micro_batches: int = 2) -> None:
    model = DataParallel(filled(Dense()))
    for step in range(num_steps):
        for micro_batch in model.micro_batches(num_micro_batches):
            mean_square(model, micro_batch, step)
        model.zero_grad()
    model.close()


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh, and as many threads as torch takes by itself on a machine with four cores."""
    current.get.register_mesh(None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_a_number_that_follows_from_the_machine_is_warned_of_in_the_first_declared_step(unset: None) -> None:
    with pytest.warns(
        UserWarning, match=r"threads per rank: 4 here, .* 1 where torchrun .* OMP_NUM"
    ) as found:
        declared_steps(3)
    assert len(found) == 1


def test_a_number_that_was_set_is_not(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # by torch.set_num_threads
    declared_steps(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    declared_steps(1)


def test_it_is_shown_once_in_a_process(unset: None) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()  # as Python starts: warnings are no errors, and each is shown once
        declared_steps(1)
        declared_steps(1)
    assert len(found) == 1
