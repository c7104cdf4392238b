"""Modules of every stage of sharding: saved in one, loaded in any other, with the same state."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from instep.checkpoint.load import verify
from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.checkpoint.states import all_bits
from tests.parity import numbers, world_of_one
from tests.state_oracle import state_entries, state_sha256
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time
NUM_LEAVES = 4
FROZEN = "layers.1.bias"


class Net(nn.Module):
    """Layers of their own units, a head in the root with a tied weight, a frozen parameter and a buffer."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(70, 70) for _ in range(3)])
        self.head = nn.Linear(70, 70)
        self.head.weight = self.layers[0].weight
        self.get_parameter(FROZEN).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(float(len(key))))
        for name, p in self.named_parameters():
            p.data = numbers(*p.shape, key=f"{key} {name}") / 10

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x) * self.scale


def made(mesh: Mesh, stage: int, key: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Stage 0 replicates everything, 1 shards the optimizer only."""
    model = Net(key)
    if stage >= 2:
        model = fully_shard(model, mesh, stage=stage)
        return model, ShardedOptimizer(model.parameters(), AdamW, mesh, lr=0.01)
    wrapped = DataParallel(model, process_group=mesh)
    if stage:
        return wrapped, ShardedOptimizer(model.parameters(), AdamW, mesh, lr=0.01)
    return wrapped, AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        step = model.sharding.next_step if hasattr(model, "sharding") else model.next_step
        for micro_batch in model.micro_batches(NUM_LEAVES):
            model(numbers(2, 70, key=f"{step} {micro_batch.index}")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(mesh: Mesh, stage: int, directory: Path) -> None:
    model, optimizer = made(mesh, stage, "a")
    train(model, optimizer, 2)
    save(directory, model, optimizer, step=2)
    mesh.world.group.barrier("the test")


def load_and_go_on(mesh: Mesh, stage: int, directory: Path, expected: str) -> None:
    model, optimizer = made(mesh, stage, "other")
    train(model, optimizer, 1)
    assert load(directory, model, optimizer).step == 2
    train(model, optimizer, 1)
    path = save(directory / "again", model, optimizer, step=3)
    mesh.world.group.barrier("the test")
    assert verify(path).state_sha256 == expected


@pytest.fixture(scope="module")
def expected() -> tuple[str, str]:
    """The hashes after two and three steps of one process."""
    model, optimizer = made(world_of_one(), 0, "a")
    hashes = []
    for step in range(1, 4):
        train(model, optimizer, 1)
        hashes.append(state_sha256(state_entries(model.module, optimizer), step))
    return hashes[1], hashes[2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 2), (2, 3)),
        ((1, 3), (3, 1)),
        ((3, 3), (2, 0)),
    ],
    ids=lambda ranks_and_stage: "{} ranks in stage {}".format(*ranks_and_stage),
)
def test_any_stage_goes_on_from_what_any_other_has_saved(
    tmp_path: Path, expected: tuple[str, str], before: tuple[int, int], after: tuple[int, int]
) -> None:
    world(before[0])(train_and_save)(stage=before[1], directory=tmp_path)
    assert verify(tmp_path / "step-00000002").state_sha256 == expected[0]
    world(after[0])(load_and_go_on)(stage=after[1], directory=tmp_path, expected=expected[1])


def save_model(mesh: Mesh, stage: int, directory: Path) -> None:
    save(directory, fully_shard(Net("a"), mesh, stage=stage), step=5)


def load_model(mesh: Mesh, stage: int, directory: Path) -> None:
    model = fully_shard(Net("other"), mesh, stage=stage)
    assert load(directory, model).step == 5
    save(directory / "again", model, step=5)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_is_saved_and_loaded_without_an_optimizer(tmp_path: Path, stage: int) -> None:
    world(3)(save_model)(stage=stage, directory=tmp_path)
    model = Net("other")
    assert load(tmp_path, model).step == 5
    assert all_bits(model.state_dict()) == all_bits(Net("a").state_dict())
    world(2)(load_model)(stage=stage, directory=tmp_path)
    model = Net("other")
    load(tmp_path / "again", model)
    assert all_bits(model.state_dict()) == all_bits(Net("a").state_dict())


@world(2)
def test_the_weights_alone_are_taken_from_a_checkpoint_with_moments(mesh: Mesh, tmp_path: Path) -> None:
    train_and_save(mesh, 3, tmp_path)
    model = fully_shard(Net("other"), mesh, stage=3)
    load(tmp_path, model)
    save(tmp_path / "again", model, step=2)
    alone, again = Net("other"), Net("other")
    load(tmp_path, alone)
    load(tmp_path / "again", again)
    assert all_bits(again.state_dict()) == all_bits(alone.state_dict())


@world(2)
def test_another_model_is_rejected_by_all_and_nothing_changes(mesh: Mesh, tmp_path: Path) -> None:
    train_and_save(mesh, 2, tmp_path)
    other = Net("other")
    other.layers.append(nn.Linear(70, 70))
    model = fully_shard(other, mesh, stage=3)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, mesh, lr=0.01)
    save(tmp_path / "before", model, optimizer, step=1)
    with pytest.raises(CheckpointRejected, match=r"layers\.3"):
        load(tmp_path, model, optimizer)
    save(tmp_path / "after", model, optimizer, step=1)
    hashes = [verify(tmp_path / when / "step-00000001").state_sha256 for when in ("before", "after")]
    assert hashes[0] == hashes[1]
