"""The mesh of a process that is still to be given its rank: models are wrapped with it; it has no numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import instep
from instep.mesh.join import await_rank
from instep.mesh.mesh import Mesh
from instep.net import device


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


@pytest.mark.parametrize("name", ["rank", "world_size", "size", "whole", "coordinates"])
def test_the_mesh_has_none_either(name: str, mesh: Mesh) -> None:
    for each in (mesh, mesh["dp"]):
        with pytest.raises(ValueError, match=r"read data with instep\.Loader"):
            getattr(each, name)


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


def test_models_are_wrapped_with_it(mesh: Mesh) -> None:
    x = torch.ones(2, 4)
    for wrap in (instep.DataParallel, instep.fully_shard):
        module = nn.Linear(4, 1)
        expected = module(x)
        assert torch.equal(wrap(module, mesh)(x), expected)
