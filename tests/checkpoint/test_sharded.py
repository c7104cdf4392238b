"""Checkpoints in pieces: saved by any number of ranks, loaded by any other number or none, the same state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer

from instep.checkpoint import convert
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.convert import to_safetensors
from instep.checkpoint.load import newest, verify
from instep.checkpoint.manifest import MANIFEST_FILE, canonical
from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.checkpoint.nets import named
from tests.checkpoint.states import all_bits
from tests.parity import numbers
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.01, "fused": True}),
    "adam, tensor lr": (Adam, {"lr": torch.tensor(0.01), "amsgrad": True}),
    "sgd": (SGD, {"lr": 0.01}),
    "momentum": (SGD, {"lr": 0.01, "momentum": 0.9}),
    "adafactor": (Adafactor, {"lr": 0.01}),
}


class Odd(nn.Module):
    """Large and small parameters, a tied and a frozen one, an empty one, and buffers."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.large = nn.Parameter(numbers(5, 4096, key=f"{key} large"))
        self.vector = nn.Parameter(numbers(4099, key=f"{key} vector"))
        self.small = nn.Parameter(numbers(3, 7, key=f"{key} small"))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(numbers(6, key=f"{key} frozen"), requires_grad=False)
        self.tied = self.large
        self.register_buffer("count", torch.tensor(len(key)))


def gradients(model: nn.Module, step: int, *, of_empty: bool) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and (p.numel() or of_empty):
            p.grad = numbers(*p.shape, key=f"gradient {name} {step}")


def plain(kind: str, steps: int, key: str = "a") -> tuple[Odd, Optimizer]:
    """Without ranks."""
    cls, options = KINDS[kind]
    model = Odd(key)
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        gradients(model, step, of_empty="eps2" not in optimizer.defaults and "d" not in optimizer.defaults)
        optimizer.step()
        optimizer.zero_grad()


def sharded(mesh: Mesh, kind: str, steps: int, key: str = "a") -> tuple[Odd, ShardedOptimizer]:
    cls, options = KINDS[kind]
    model = Odd(key)
    optimizer = ShardedOptimizer(model.parameters(), cls, mesh, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def plain_hash(kind: str, steps: int) -> str:
    return state_sha256(state_entries(*plain(kind, steps)), steps)


def hash_of(model: nn.Module, optimizer: ShardedOptimizer, kind: str, steps: int) -> str:
    """Of the whole state, which every rank gathers."""
    cls, options = KINDS[kind]
    whole = Odd("whole")
    whole.load_state_dict(model.state_dict())
    other = cls(whole.parameters(), **options)
    other.load_state_dict(optimizer.state_dict())
    return state_sha256(state_entries(whole, other), steps)


@pytest.mark.parametrize("kind", KINDS)
@world(3)
def test_three_ranks_save_and_one_process_loads(mesh: Mesh, tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, step=2, **named(*sharded(mesh, kind, 2)))
    manifest = verify(path)
    assert manifest.state_sha256 == plain_hash(kind, 2)
    assert manifest.world_size == 3
    model, optimizer = plain(kind, 0, "other")
    resumed = load(tmp_path, model=model, optimizer=optimizer)
    assert resumed.step == 2
    train(model, optimizer, range(2, 4))
    assert state_sha256(state_entries(model, optimizer), 4) == plain_hash(kind, 4)


@pytest.mark.parametrize("kind", KINDS)
@world(3)
def test_one_process_saves_and_three_ranks_load(mesh: Mesh, tmp_path: Path, kind: str) -> None:
    if mesh.rank == 0:
        save(tmp_path, step=2, **named(*plain(kind, 2)))
    mesh.world.group.barrier("the test")
    model, optimizer = sharded(mesh, kind, 1, "other")
    assert load(tmp_path, model=model, optimizer=optimizer).step == 2
    train(model, optimizer, range(2, 4))
    assert hash_of(model, optimizer, kind, 4) == plain_hash(kind, 4)


def save_on_ranks(mesh: Mesh, directory: Path, kind: str, step: int) -> None:
    save(directory, step=step, **named(*sharded(mesh, kind, step)))


def saved(tmp_path: Path) -> Path:
    world(2)(save_on_ranks)(directory=tmp_path, kind="adamw", step=1)
    return tmp_path / "step-00000001"


def resigned(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest after ``change``, with the hash that it then has to have."""
    body = json.loads((path / MANIFEST_FILE).read_bytes())
    change(body)
    del body["sha256"]
    body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
    (path / MANIFEST_FILE).write_bytes(json.dumps(body).encode())


def hole(body: dict[str, Any]) -> None:
    del body["pieces"]["entries"]["model:large"][2][0]


def overlap(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:large"][2][0][1] += 1


def other_shape(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:large"][0] = [4096, 6]


def swapped(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:large"][0] = [4096, 5]


def other_dtype(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["optimizer:exp_avg/vector"][1] = "int32"


def elsewhere(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:small"][2][0][2] = "../model.safetensors"


def unlisted(body: dict[str, Any]) -> None:
    del body["pieces"]["entries"]["model:frozen"]


def nonsense(body: dict[str, Any]) -> None:
    body["pieces"] = {"entries": [1, 2], "ties": None}


@pytest.mark.parametrize(
    "change", [hole, overlap, other_shape, swapped, other_dtype, elsewhere, unlisted, nonsense]
)
def test_pieces_that_are_no_whole_state_are_rejected_and_nothing_changes(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = saved(tmp_path)
    resigned(path, lambda body: None)
    verify(path)  # as it was, it is sound
    resigned(path, change)
    model, optimizer = plain("adamw", 0, "other")
    before = state_sha256(state_entries(model, optimizer), 0)
    with pytest.raises(CheckpointRejected):
        load(tmp_path, model=model, optimizer=optimizer)
    assert state_sha256(state_entries(model, optimizer), 0) == before
    world(2)(rejects_on_ranks)(directory=tmp_path)


def rejects_on_ranks(mesh: Mesh, directory: Path) -> None:
    model, optimizer = sharded(mesh, "adamw", 1, "other")
    before = hash_of(model, optimizer, "adamw", 1)
    with pytest.raises(CheckpointRejected):
        load(directory, model=model, optimizer=optimizer)
    assert hash_of(model, optimizer, "adamw", 1) == before


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "optimizer-00000-of-00002.safetensors"])
def test_a_file_that_is_altered_or_missing_is_found_by_all_ranks(tmp_path: Path, file: str) -> None:
    path = saved(tmp_path) / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    world(3)(rejects_on_ranks)(directory=tmp_path)
    path.unlink()
    world(2)(rejects_on_ranks)(directory=tmp_path)


def test_a_state_that_is_not_the_one_that_was_saved_is_rejected_by_its_hash(tmp_path: Path) -> None:
    """A file and its record were changed together."""
    path = saved(tmp_path)
    file = path / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def sign(body: dict[str, Any]) -> None:
        body["files"][file.name]["sha256"] = hashlib.sha256(data).hexdigest()

    resigned(path, sign)
    verify(path)
    world(2)(rejects_on_ranks)(directory=tmp_path)
    with pytest.raises(CheckpointRejected, match="hash"):
        load(tmp_path, **named(*plain("adamw", 0, "other")))


@world(2)
def test_the_same_step_counts_as_saved_and_another_state_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    model, optimizer = sharded(mesh, "adamw", 1)
    path = save(tmp_path, step=1, model=model, optimizer=optimizer)
    written = (path / MANIFEST_FILE).stat().st_mtime_ns
    assert save(tmp_path, step=1, model=model, optimizer=optimizer) == path
    assert (path / MANIFEST_FILE).stat().st_mtime_ns == written
    train(model, optimizer, range(1, 2))
    with pytest.raises(FileExistsError if mesh.rank == 0 else CheckpointRejected, match="exists already"):
        save(tmp_path, step=1, model=model, optimizer=optimizer)
    assert newest(tmp_path).manifest.state_sha256 == plain_hash("adamw", 1)


@world(2)
def test_the_background_saves_what_was_there_and_not_what_came_after(mesh: Mesh, tmp_path: Path) -> None:
    model, optimizer = sharded(mesh, "adamw", 2)
    saver = Saver(timeout_s=20)
    draft = saving.draft(step=2, data_cursor=0, numerical={}, world_size=2)
    saver.save(tmp_path, training_state(model, optimizer), draft)
    train(model, optimizer, range(2, 4))
    saver.close()
    mesh.world.group.barrier("the test")
    assert verify(tmp_path / "step-00000002").state_sha256 == plain_hash("adamw", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("lost", [0, 1])
@world(2)
def test_a_save_without_one_of_its_ranks_is_given_up_and_leaves_nothing(
    mesh: Mesh, tmp_path: Path, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = sharded(mesh, "adamw", 1)
    saver = Saver(timeout_s=60)
    draft = saving.draft(step=1, data_cursor=0, numerical={}, world_size=2)
    state = training_state(model, optimizer)
    if mesh.rank == lost:
        saving.plan(state, tmp_path / "step-00000001")  # and no more
    else:
        saver.save(tmp_path, state, draft)
        saver.give_up()
        saver.close()
        assert saver.last is None
    mesh.world.group.barrier("the test")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optimizer", [False, True])
def test_any_checkpoint_becomes_one_plain_file(
    tmp_path: Path, optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4096)
    from_pieces = to_safetensors(saved(tmp_path), tmp_path / "a.safetensors", optimizer=optimizer)
    model, plain_optimizer = plain("adamw", 1)
    path = save(tmp_path / "whole", step=1, model=model, optimizer=plain_optimizer)
    from_whole = to_safetensors(path, tmp_path / "b.safetensors", optimizer=optimizer)
    assert from_pieces.read_bytes() == from_whole.read_bytes()
    entries = dict(state_entries(model, plain_optimizer if optimizer else None))
    assert all_bits(load_file(from_pieces)) == all_bits(entries)
    other = Odd("other")
    if not optimizer:
        load_model(other, from_pieces)
        assert all_bits(other.state_dict()) == all_bits(model.state_dict())
    with pytest.raises(FileExistsError):
        to_safetensors(path, from_whole)


def test_moments_of_a_frozen_parameter_that_a_sharded_optimizer_does_not_hold_are_named(
    tmp_path: Path,
) -> None:
    """Adagrad makes moments for every parameter that it is given."""

    def frozen() -> nn.Module:
        module = nn.Linear(3, 2)
        module.bias.requires_grad_(False)
        return module

    module = frozen()
    save(tmp_path, step=1, model=module, optimizer=Adagrad(module.parameters()))
    module = frozen()
    optimizer = ShardedOptimizer(module.parameters(), Adagrad)
    with pytest.raises(CheckpointRejected, match=r"'step' of 'bias': expected none.* frozen"):
        load(tmp_path, model=module, optimizer=optimizer)
    optimizer.close()
    module.bias.requires_grad_(True)
    optimizer = ShardedOptimizer(module.parameters(), Adagrad)
    assert load(tmp_path, model=module, optimizer=optimizer).step == 1
