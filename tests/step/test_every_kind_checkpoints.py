"""Every kind saves what every other kind loads, on other ranks, with the state of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.load import verify
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from tests.checkpoint.states import all_bits
from tests.kinds import EVERY, KINDS, STAGES, WIDTH, Program, close, on_every_kind
from tests.parity import filled, world_of_one
from tests.world import world

STEPS = 2


class Scaled(nn.Linear):
    """With a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu() * self.scale


def tied(key: str = "a") -> nn.Sequential:
    """Layers of their own, the last with the first one's weight, a frozen parameter and buffers."""
    layers = nn.Sequential(*(Scaled() for _ in range(4)))
    filled(nn.ModuleDict({key: layers}))
    layers[3].weight = layers[0].weight
    layers[1].bias.requires_grad_(False)
    for each in layers:
        each.scale.fill_(len(key))
    return layers


PROGRAM = Program("replicated", tied, num_steps=STEPS)


def make(kind: str, mesh: Mesh, key: str) -> tuple[Any, torch.optim.Optimizer]:
    return replace(PROGRAM, kind=kind).make(tied(key), mesh)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        PROGRAM.step(model, optimizer, number)


def hashes(directory: Path) -> list[str]:
    """Those of one process after two and three steps."""
    model, optimizer = make("replicated", world_of_one(), "a")
    found = []
    for step in range(STEPS + 1):
        train(model, optimizer, range(step, step + 1))
        found.append(
            verify(
                instep.save(directory / "alone", step=step + 1, model=model, optimizer=optimizer)
            ).state_sha256
        )
    close(model)
    return found[STEPS - 1 :]


def on_ranks(size: int, kind: str) -> Any:
    axes = KINDS[kind].axes
    return partial(world, size, timeout_s=20.0, **({"dp": -1, **axes} if axes else {}))()  # a disk is slow


def train_and_save(mesh: Mesh, kind: str, directory: Path) -> None:
    model, optimizer = make(kind, mesh, "a")
    train(model, optimizer, range(STEPS))
    instep.save(directory, step=STEPS, model=model, optimizer=optimizer)
    mesh.world.group.barrier("the test")
    close(optimizer, model)


def load_and_go_on(mesh: Mesh, kind: str, directory: Path, expected: str) -> None:
    model, optimizer = make(kind, mesh, "other")
    train(model, optimizer, range(1))
    assert instep.load(directory, model=model, optimizer=optimizer).step == STEPS
    train(model, optimizer, range(STEPS, STEPS + 1))
    path = instep.save(directory / "again", step=STEPS + 1, model=model, optimizer=optimizer)
    mesh.world.group.barrier("the test")
    assert verify(path).state_sha256 == expected
    close(optimizer, model)


RING = [*zip(EVERY, (3, 2, 3, 2, 2), strict=True)]  # each kind loads what the one before it has saved


@pytest.mark.parametrize(("before", "after"), [*zip(RING, RING[1:] + RING[:1], strict=True)], ids=str)
def test_any_kind_goes_on_from_what_another_has_saved(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    first, second = hashes(tmp_path)
    on_ranks(before[1], before[0])(train_and_save)(kind=before[0], directory=tmp_path)
    assert verify(tmp_path / f"step-{STEPS:08d}").state_sha256 == first
    on_ranks(after[1], after[0])(load_and_go_on)(kind=after[0], directory=tmp_path, expected=second)


@on_every_kind(2)
def test_weights_alone_are_saved_and_loaded_also_from_a_checkpoint_with_moments(
    mesh: Mesh, kind: str, tmp_path: Path
) -> None:
    model, optimizer = make(kind, mesh, "a")
    instep.save(tmp_path / "weights", step=5, model=model)
    instep.save(tmp_path / "all", step=6, model=model, optimizer=optimizer)
    close(optimizer, model)
    for name in ("weights", "all"):
        mesh.world.group.barrier("the test")
        plain = tied("other")
        instep.load(tmp_path / name, model=plain)
        assert all_bits(plain.state_dict()) == all_bits(tied("a").state_dict())
        other, _ = make(kind, mesh, "other")
        instep.load(tmp_path / name, model=other)
        assert all_bits(instep.full_state_dict(other)) == all_bits(plain.state_dict())
        close(other)


@on_every_kind(2, STAGES)
def test_another_model_is_rejected_by_all_and_nothing_changes(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    model, _ = make(kind, mesh, "a")
    instep.save(tmp_path, step=1, model=model)
    close(model)
    other = nn.Sequential(*tied("other"), filled(Scaled()))
    before = all_bits(other.state_dict())
    model, _ = KINDS[kind].make(other, mesh)
    mesh.world.group.barrier("the test")
    with pytest.raises(CheckpointRejected, match=r"4\."):
        instep.load(tmp_path, model=model)
    assert all_bits(instep.full_state_dict(model)) == before
    close(model)
