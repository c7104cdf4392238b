"""Tensors in any boxes and flat ranges have the hash of the whole, and are loaded in any others."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.checkpoint import save as saving
from instep.checkpoint.load import open_source, read_tensors, verify
from instep.mesh.mesh import Mesh
from instep.ordered.hash import SharedHash
from instep.ordered.shards import MODEL, OPTIMIZER, Box, Shard, held_shape, owned
from tests.state_oracle import sampled_blocks, state_digests, state_sha256
from tests.world import world

RANKS = 4
SHAPES = [(), (0, 3), (7,), (4096,), (9001,), (70, 130), (130, 70), (64, 128), (3, 40, 77), (2, 3, 5, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def pieces(shape: tuple[int, ...], random: Random) -> list[tuple[Box | None, int, int]]:
    """A partition into at most one piece per rank: boxes that are split, then flat ranges of them."""
    whole: Box = tuple((0, size) for size in shape)
    boxes = [whole]
    while random.random() < 0.7 and len(boxes) < RANKS and math.prod(shape):
        box = boxes.pop(random.randrange(len(boxes)))
        dim = random.randrange(len(shape)) if shape else 0
        if not shape or box[dim][1] - box[dim][0] < 2:
            boxes.append(box)
            break
        (start, stop), at = box[dim], random.randrange(box[dim][0] + 1, box[dim][1])
        boxes += [(*box[:dim], ends, *box[dim + 1 :]) for ends in ((start, at), (at, stop))]
    found = [(box, 0, math.prod(stop - start for start, stop in box)) for box in boxes]
    while random.random() < 0.5 and len(found) < RANKS:
        box, first, last = found.pop(random.randrange(len(found)))
        at = random.randrange(first, last) if last else 0
        found += [(box, *ends) for ends in ((first, at), (at, last)) if ends[0] < ends[1]]
        if not last:
            found.append((box, 0, 0))
            break
    return [(None if box == whole else box, first, last) for box, first, last in found]


def shards(tensors: dict[str, Tensor], seed: int, rank: int) -> list[Shard]:
    """What ``rank`` has of ``tensors``; a piece may be held by several ranks."""
    random, mine = Random(seed), []
    for place, (name, x) in enumerate(tensors.items()):
        found = pieces(tuple(x.shape), random)
        owners = [*range(len(found)), *(random.randrange(len(found)) for _ in range(RANKS - len(found)))]
        random.shuffle(owners)
        box, first, last = found[owners[rank]]
        inside = x[tuple(slice(*ends) for ends in box)] if box else x
        value = inside.reshape(-1)[first:last].view(held_shape(tuple(x.shape), first, last, box)).clone()
        holders = tuple(r for r, piece in enumerate(owners) if piece == owners[rank])
        mine.append(Shard(name, tuple(x.shape), x.dtype, first, last, (place, ""), box, value, holders))
    return mine


def drawn(seed: int) -> dict[str, Tensor]:
    random, found = Random(seed), {}
    generator = torch.Generator().manual_seed(seed)
    for i in range(3):
        shape, dtype = random.choice(SHAPES), random.choice(DTYPES)
        kind = OPTIMIZER if i == 2 else MODEL
        found[f"{kind}m/{i}"] = torch.randn(shape, generator=generator).to(dtype)
    return found


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

    def options(self) -> None:
        return None


def entries(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name.partition(":")[2], x) for name, x in tensors.items()]


SEEDS = st.integers(0, 1 << 30)


@world(RANKS)
def hashed(mesh: Mesh, seed: int) -> None:
    shared = SharedHash(mesh.world.group)
    for again in range(2):  # by a table that is made, and by one that is there
        tensors = drawn(seed)
        own = Divided(mesh, tensors, seed).owned()
        assert shared.digests(own, 7 + again) == state_digests(entries(tensors), 7 + again)
        for step in range(3):
            assert shared.samples(own, step, 3) == sampled_blocks(entries(tensors), step, 3)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_any_partition_has_the_hash_and_the_samples_of_the_whole(seed: int) -> None:
    hashed(seed=seed)


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


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_what_was_saved_in_one_partition_is_loaded_in_another(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved_and_loaded(seed=seed, directory=Path(directory))


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
