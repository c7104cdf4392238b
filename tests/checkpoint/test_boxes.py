"""What was saved in any partition is loaded, bit for bit, in any other."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.checkpoint import save as saving
from instep.checkpoint.load import open_source, verify
from instep.mesh.mesh import Mesh
from instep.state.shards import MODEL, Shard, owned
from tests.checkpoint.states import OPTIONS, read_tensors
from tests.state.partitions import RANKS, drawn, entries, shards
from tests.state_oracle import state_sha256
from tests.world import world


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
