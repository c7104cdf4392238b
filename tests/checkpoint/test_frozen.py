"""Checkpoints without frozen parameters: of any kind on any ranks, for the same base model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import instep
from instep.checkpoint.load import read_manifest, verify
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from tests.kinds import LOOPS, Program, assert_same_state, close, on_every_kind, state_of
from tests.parity import filled, world_of_one


class Adapted(nn.Sequential):
    """A frozen layer of the base, a small one that is trained, and one that is tied and frozen."""

    def __init__(self) -> None:
        tied = nn.Linear(72, 72).requires_grad_(False)
        super().__init__(
            tied, nn.Sequential(nn.Linear(72, 8), nn.Linear(8, 72)), nn.Tanh(), nn.Linear(72, 72)
        )
        self[3].requires_grad_(False)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def program(kind: str) -> Program:
    return Program(kind, module=Adapted, groups=trainable)


def built(kind: str, mesh: Mesh, change: float = 0.0) -> tuple[Any, Any]:
    module = filled(Adapted())
    with torch.no_grad():
        module[3].weight[5, 5] += change
    return program(kind).make(module, mesh)


def names_on_disk(path: Path) -> set[str]:
    found: set[str] = set()
    for file in path.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= set(opened.keys())
    return found


@on_every_kind(2)
def test_what_two_ranks_save_any_kind_loads(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    model, optimizer = built(kind, mesh)
    program(kind).step(model, optimizer, 0)
    path = instep.save(tmp_path, step=1, frozen=False, model=model, optimizer=optimizer)
    again = instep.save(tmp_path, step=1, frozen=False, model=model, optimizer=optimizer)
    whole = instep.save(tmp_path / "whole", step=1, model=model, optimizer=optimizer)
    expected = state_of(model, optimizer)
    close(optimizer, model)
    mesh.world.group.barrier("the test")
    assert again == path
    assert names_on_disk(path) == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}
    assert set(verify(path).frozen) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert read_manifest(path).state_sha256 == read_manifest(whole).state_sha256
    for other in (kind,) if kind == "pipeline" else LOOPS:
        model, optimizer = built(other, mesh)
        assert instep.load(tmp_path, model=model, optimizer=optimizer).step == 1
        assert_same_state(state_of(model, optimizer), expected)
        close(optimizer, model)
    if mesh.rank == 0:
        model, optimizer = built("replicated", world_of_one())
        instep.load(tmp_path, model=model, optimizer=optimizer)
        assert_same_state(state_of(model, optimizer), expected)
        close(optimizer, model)


@on_every_kind(2)
def test_another_base_model_is_rejected_and_nothing_changes(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    model, optimizer = built(kind, mesh)
    instep.save(tmp_path, step=0, frozen=False, model=model, optimizer=optimizer)
    close(optimizer, model)
    model, optimizer = built(kind, mesh, change=1.0)
    before = state_of(model, optimizer)
    problem = "without 4 frozen weights, and 1 of them have other values in this model, '3.weight' first"
    for objects in ({"model": model, "optimizer": optimizer}, {"model": model}):
        with pytest.raises(CheckpointRejected, match=problem):
            instep.load(tmp_path, **objects)
    assert_same_state(state_of(model, optimizer), before)
    close(optimizer, model)


def test_a_model_without_those_parameters_is_rejected(tmp_path: Path) -> None:
    instep.save(tmp_path, step=0, frozen=False, model=Adapted())
    with pytest.raises(
        CheckpointRejected, match=r"without 4 frozen weights, and this model has no '0\.bias'"
    ):
        instep.load(tmp_path, model=nn.Sequential(nn.Identity(), Adapted()[1]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.adapter = nn.Linear(4, 4)
        self.head.weight = self.inner.weight
        self.inner.requires_grad_(False)


def test_frozen_ties_are_left_out_under_all_of_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Tied()
    path = instep.save(tmp_path, step=0, frozen=False, model=saved)
    assert names_on_disk(path) == {"adapter.weight", "adapter.bias"}
    torch.manual_seed(0)
    loaded = Tied()
    nn.init.zeros_(loaded.adapter.weight)
    instep.load(tmp_path, model=loaded)
    assert torch.equal(loaded.adapter.weight, saved.adapter.weight)


def test_what_was_stepped_before_it_was_frozen_is_saved(tmp_path: Path) -> None:
    """The script builds it with other values."""
    model = Adapted().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 72)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    path = instep.save(tmp_path, step=1, frozen=False, model=model, optimizer=optimizer)
    assert verify(path).frozen == {}
    wrapped = instep.DataParallel(Adapted().requires_grad_(True))  # SGD keeps nothing that would show it
    wrapped.module[0].requires_grad_(False)
    assert verify(instep.save(tmp_path / "sgd", step=1, frozen=False, model=wrapped)).frozen == {}
    wrapped.close()
