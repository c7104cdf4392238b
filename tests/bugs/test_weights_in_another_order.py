"""Weights that do not lie in memory in logical order: channels_last, transposed.

Slices were cut in the order of memory, while hashes, norms and files count elements in logical order. So the
gradient norm of such a weight depended on who had which piece of it, and what was cut could not be saved, nor
loaded from a plain checkpoint, which was noticed at the first save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import instep
from instep.checkpoint.state import TrainingState
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.state.hash import SharedHash
from tests.parity import filled, numbers, world_of_one
from tests.shard.trained import assert_same, copied
from tests.world import world

G, STEPS, CLIP = 3, 4, 0.01
STAGES = [1, 2, 3]
OPTIONS: dict[str, Any] = {"lr": 0.02, "fused": True}
Uninterrupted = tuple[list[float], list[dict[str, Any]], list[str]]


class Mixed(nn.Module):
    """Convolutions in channels_last, transposed matrices of several blocks, one of which has a rest after
    the last whole vector; and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 36, 3))
        self.to(memory_format=torch.channels_last)
        self.mix = nn.Linear(36, 171)
        self.mix.weight = nn.Parameter(torch.empty(36, 171).t())
        self.out = nn.Linear(171, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        return self.out(torch.tanh(self.mix(x)))


def make(
    mesh: Mesh, stage: int, module: nn.Module | None = None, *, one_copy: bool = False
) -> tuple[Any, Any]:
    """A model and its optimizer: in stage 0 replicated, else in slices."""
    module = filled(Mixed()) if module is None else module
    if stage < 2:
        model: Any = instep.DataParallel(module, process_group=mesh)
    else:
        model = instep.fully_shard(module, mesh, stage=stage, one_copy=one_copy)
    if stage == 0:
        return model, AdamW(model.parameters(), **OPTIONS)
    made = instep.ShardedOptimizer(
        model.parameters(), AdamW, mesh, one_copy=one_copy and stage == 1, **OPTIONS
    )
    return model, made


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """The gradient norms of steps ``first`` to ``last``."""
    norms = []
    for step in range(first, last):
        for micro_batch in model.micro_batches(G, step=step):
            key = f"images {step} {micro_batch.index}"
            model(numbers(2, 3, 7, 7, key=key)).square().mean().backward()
        norms.append(instep.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights = instep.full_state_dict(model.module if isinstance(model, instep.DataParallel) else model)
    return copied({"model": dict(weights), "optimizer": optimizer.state_dict()["state"]})


def hash_of(model: Any, optimizer: Any, step: int) -> str:
    state = TrainingState(model, optimizer)
    return SharedHash(state.group).digests(state.owned(), step)[0]


def close(*parts: Any) -> None:
    for part in parts:
        if hasattr(part, "close"):
            part.close()


def uninterrupted() -> Uninterrupted:
    """Norms; state and hash after each step, on one rank that shards nothing."""
    model, optimizer = make(world_of_one(), 0)
    norms, states, hashes = [], [], []
    for step in range(STEPS):
        norms += train(model, optimizer, step, step + 1)
        states.append(state_of(model, optimizer))
        hashes.append(hash_of(model, optimizer, step + 1))
    close(model)
    return norms, states, hashes


@pytest.fixture(scope="module")
def expected() -> Uninterrupted:
    return uninterrupted()


def plain_checkpoint(path: Path) -> Path:
    model, optimizer = make(world_of_one(), 0)
    train(model, optimizer, 0, 2)
    instep.save(path, model, optimizer, step=2)
    close(model)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return plain_checkpoint(tmp_path / "plain")


def assert_goes_on(mesh: Mesh, stage: int, expected: Uninterrupted, saved: Path, back: Path) -> None:
    """From the plain checkpoint in ``stage``, and from there back into a plain optimizer."""
    norms, states, hashes = expected
    module = Mixed()
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(7.0)
    model, optimizer = make(mesh, stage, module)
    assert instep.load(saved, model, optimizer).step == 2
    assert hash_of(model, optimizer, 2) == hashes[1]
    assert_same(state_of(model, optimizer), states[1], "loaded")
    assert train(model, optimizer, 2, 3) == norms[2:3]
    assert hash_of(model, optimizer, 3) == hashes[2]
    assert_same(state_of(model, optimizer), states[2], "one step later")
    instep.save(back, model, optimizer, step=3)
    close(optimizer, model)
    model, optimizer = make(mesh, 0, Mixed())
    assert instep.load(back, model, optimizer).step == 3
    assert train(model, optimizer, 3, 4) == norms[3:4]
    assert_same(state_of(model, optimizer), states[3], "back again")
    close(model)


@pytest.mark.parametrize("stage", STAGES)
@world(2)
def test_two_ranks_go_on_with_a_plain_checkpoint_and_back(
    mesh: Mesh, expected: Uninterrupted, saved: Path, tmp_path: Path, stage: int
) -> None:
    assert_goes_on(mesh, stage, expected, saved, tmp_path / "back")


def halved_between_steps(mesh: Mesh, stage: int, *, one_copy: bool = False) -> dict[str, Any]:
    """The state of a training whose program writes to the weights after the first and the second step."""
    model, optimizer = make(mesh, stage, one_copy=one_copy)
    for step in range(2):
        train(model, optimizer, step, step + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    found = state_of(model, optimizer)
    mesh.world.group.barrier("the end of the test")
    close(optimizer, model)
    return found


@pytest.mark.parametrize("stage", STAGES)
@world(2)
def test_what_is_written_to_weights_between_steps_is_stepped(mesh: Mesh, stage: int) -> None:
    found = halved_between_steps(mesh, stage)
    assert_same(found, halved_between_steps(world_of_one(), 0), "weights that were halved")


@world(2, backend="shm")
def test_what_one_rank_writes_to_one_copy_no_other_reads(mesh: Mesh) -> None:
    model, optimizer = make(mesh, 1, one_copy=True)
    train(model, optimizer, 0, 1)
    before = copied(state_of(model, optimizer)["model"])
    if mesh.rank == 0:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    mesh.world.group.barrier("the writing of rank 0")
    if mesh.rank == 1:
        assert_same(copied(dict(model.module.state_dict())), before, "weights of rank 1")
    for p, first, last, values in optimizer.pieces():
        assert torch.equal(values, p.detach().flatten()[first:last])
    with pytest.raises(ReplicasDiffer, match=r"features\.0\.weight"):
        train(model, optimizer, 1, 2)
    close(optimizer, model)


@world(2)
def test_pieces_for_an_average_are_ranges_in_logical_order(mesh: Mesh) -> None:
    model, optimizer = make(mesh, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    for p, first, last, values in optimizer.pieces():
        assert torch.equal(values, p.detach().flatten()[first:last])
    close(optimizer, model)
