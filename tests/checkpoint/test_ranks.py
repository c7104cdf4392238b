"""A divided state: saved by any number of ranks, each part once, loaded by any other number or none."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.optim import Adafactor, Adagrad, Adam, AdamW, Optimizer

from instep.checkpoint import convert
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.convert import find, to_safetensors
from instep.checkpoint.load import newest, open_source, verify
from instep.checkpoint.manifest import MANIFEST_FILE, canonical
from instep.checkpoint.shorthand import load, save
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.shard.optimizer import ShardedOptimizer
from instep.state.shards import MODEL, Shard, owned
from instep.state.stored import assemble, shards_from_json, shards_to_json
from tests import kinds
from tests.checkpoint.nets import named
from tests.checkpoint.states import OPTIONS, all_bits, read_tensors
from tests.kinds import Program, net
from tests.parity import filled, numbers
from tests.state.partitions import RANKS, drawn, entries, shards
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.01, "fused": True}),
    "adam, tensor lr": (Adam, {"lr": torch.tensor(0.01), "amsgrad": True}),
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
def test_three_ranks_save_what_one_process_loads_and_the_other_way_round(
    mesh: Mesh, tmp_path: Path, kind: str
) -> None:
    path = save(tmp_path, step=2, **named(*sharded(mesh, kind, 2)))
    manifest = verify(path)
    assert (manifest.state_sha256, manifest.world_size) == (plain_hash(kind, 2), 3)
    model, optimizer = plain(kind, 0, "other")
    assert load(tmp_path, model=model, optimizer=optimizer).step == 2
    train(model, optimizer, range(2, 4))
    assert state_sha256(state_entries(model, optimizer), 4) == plain_hash(kind, 4)
    if mesh.rank == 0:
        save(tmp_path / "alone", step=4, model=model, optimizer=optimizer)
    mesh.world.group.barrier("the test")
    ours, steps = sharded(mesh, kind, 1, "other")
    assert load(tmp_path / "alone", model=ours, optimizer=steps).step == 4
    train(ours, steps, range(4, 5))
    assert hash_of(ours, steps, kind, 5) == plain_hash(kind, 5)


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


def other_shape(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:large"][0] = [4096, 6]


def elsewhere(body: dict[str, Any]) -> None:
    body["pieces"]["entries"]["model:small"][2][0][2] = "../model.safetensors"


def unlisted(body: dict[str, Any]) -> None:
    del body["pieces"]["entries"]["model:frozen"]


@pytest.mark.parametrize("change", [hole, other_shape, elsewhere, unlisted])
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
def test_a_file_that_is_altered_also_with_its_record_or_missing_is_found_by_all_ranks(
    tmp_path: Path, file: str
) -> None:
    path = saved(tmp_path) / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    world(3)(rejects_on_ranks)(directory=tmp_path)
    digest = hashlib.sha256(data).hexdigest()
    resigned(path.parent, lambda body: body["files"][file].update(sha256=digest))
    verify(path.parent)
    with pytest.raises(CheckpointRejected, match="hash"):
        load(tmp_path, **named(*plain("adamw", 0, "other")))
    world(2)(rejects_on_ranks)(directory=tmp_path)
    path.unlink()
    world(2)(rejects_on_ranks)(directory=tmp_path)


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
    from_pieces = to_safetensors(find(saved(tmp_path)), tmp_path / "a.safetensors", optimizer=optimizer)
    model, plain_optimizer = plain("adamw", 1)
    path = save(tmp_path / "whole", step=1, model=model, optimizer=plain_optimizer)
    from_whole = to_safetensors(find(path), tmp_path / "b.safetensors", optimizer=optimizer)
    assert from_pieces.read_bytes() == from_whole.read_bytes()
    entries = dict(state_entries(model, plain_optimizer if optimizer else None))
    assert all_bits(load_file(from_pieces)) == all_bits(entries)
    other = Odd("other")
    if not optimizer:
        load_model(other, from_pieces)
        assert all_bits(other.state_dict()) == all_bits(model.state_dict())
    with pytest.raises(FileExistsError):
        to_safetensors(find(path), from_whole)


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


ROWS = {"dp": 2, "shard": 2}


PROGRAM = Program("replicated", net)


@world(4, **ROWS)
@pytest.mark.parametrize("kind", ["stage 1", "stage 3"])
def test_of_what_shard_groups_hold_alike_each_writes_a_run_and_all_of_them_everything_once(
    mesh: Mesh, kind: str
) -> None:
    model, optimizer = kinds.KINDS[kind].make(filled(net()), mesh)
    PROGRAM.step(model, optimizer, 0)
    state = training_state(model, optimizer)
    assert state.is_divided
    assert state.group.ranks == state.everyone.ranks == (0, 1, 2, 3)
    held, owned = state.shards(), state.owned()
    for shard in held:
        assert mesh.rank in shard.holders
        assert (mesh.rank + 2) % 4 in shard.holders  # at the same place in the other shard group
    by_rank = told(mesh, shards_to_json(held))
    assert by_rank[0] == by_rank[2] and by_rank[1] == by_rank[3]
    rows = {str(rank): shards_from_json(its) for rank, its in enumerate(told(mesh, owned_rows(owned)))}
    everything = assemble(rows)  # or it raises: each element once
    assert set(everything) == {row[0] for its in by_rank for row in its}
    sizes = [sum(row.last - row.first for row in its) for its in rows.values()]
    assert max(sizes) - min(sizes) <= len(everything) * BLOCK_ELEMENTS
    alone = training_state(getattr(model, "module", model), optimizer, mesh.data.group)
    assert alone.group.ranks == state.group.ranks
    assert owned_rows(alone.owned()) == owned_rows(owned)


def owned_rows(owned: list[Shard]) -> Any:
    return shards_to_json(owned)


def told(mesh: Mesh, value: Any) -> list[Any]:
    """Every rank's ``value``."""
    return [
        json.loads(data) for data in mesh.world.group.all_gather_bytes(json.dumps(value).encode(), "rows")
    ]


@world(4, **ROWS)
def save_the_bare_module(mesh: Mesh, directory: Path) -> None:
    model, optimizer = kinds.KINDS["stage 1"].make(filled(net()), mesh)
    others = ShardedOptimizer(nn.Linear(3, 2).parameters(), torch.optim.SGD, mesh["shard"], lr=0.1)
    assert (optimizer.num_shard_groups, others.num_shard_groups) == (2, 2)
    with pytest.raises(ValueError, match=r"2 shard groups of 2 ranks have.*pass the DataParallel"):
        save(directory, step=1, model=model.module, optimizer=optimizer)
    assert not list(directory.iterdir())
    others.close()


def test_a_bare_module_with_several_shard_groups_is_refused_by_name(tmp_path: Path) -> None:
    save_the_bare_module(directory=tmp_path)


@dataclass
class Divided:
    """``tensors`` divided among the ranks of ``mesh`` by ``seed``, as a ``State``."""

    mesh: Mesh
    tensors: dict[str, Tensor]
    seed: int

    @property
    def group(self):
        return self.mesh.world.group

    def owned(self) -> list[Shard]:
        return list(owned(shards(self.tensors, self.seed, self.mesh.rank), self.mesh.rank))

    def ties(self) -> dict[str, str]:
        return {}

    def options(self) -> object:
        return OPTIONS


@world(RANKS)
def saved_and_loaded(mesh: Mesh, seed: int, directory: Path) -> None:
    tensors = drawn(seed)
    draft = saving.draft(step=3, data_cursor=0, numerical={}, world_size=RANKS)
    path = saving.save(directory, Divided(mesh, tensors, seed), draft)
    found = verify(path)
    assert found.state_sha256 == state_sha256(entries(tensors), 3)
    source = open_source(path, found)
    for x in shards(tensors, seed + 1, mesh.rank):
        assert bits(source.read(x.name, x.first, x.last, x.box)) == bits(x.tensor)
    named = {name.removeprefix(MODEL): x for name, x in tensors.items() if name.startswith(MODEL)}
    whole = read_tensors(path, "model.safetensors", {n: (tuple(x.shape), x.dtype) for n, x in named.items()})
    assert {n: bits(x) for n, x in whole.items()} == {n: bits(x) for n, x in named.items()}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_was_saved_in_one_partition_is_loaded_in_another(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved_and_loaded(seed=seed, directory=Path(directory))


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
