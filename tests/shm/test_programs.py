"""Drawn programs of operations, one after the other on the same halves: each gives what it is defined as."""

from __future__ import annotations

import random

import pytest
import torch

from tests.shm import calls
from tests.shm.calls import group_of
from tests.shm.conftest import SMALL_BYTES
from tests.shm.numbers import op, reduced, same_bits, values
from tests.world import world

# Of float32: around what is added at once, what one piece holds, and several times as much as both halves.
LENGTHS = (0, 1, 15, 16, 17, 1023, 2048, 2049, 3000, SMALL_BYTES // 4, 8192, 8193, 20_011)
NAMES = ("sum", "avg", "product", "max")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_operations_follow_each_other_in_any_order(size, seed, small_halves):
    world(size, backend="shm", timeout_s=20)(follows)(seed=seed)


def follows(mesh, seed):
    pg, size, program = group_of(mesh), mesh.world.size, random.Random(seed)
    shared = pg.allocate(4 * LENGTHS[-1]).elements(torch.float32)
    own = random.Random(100 * seed + mesh.rank)
    for n in range(40):
        length, name, root = program.choice(LENGTHS), program.choice(NAMES), program.randrange(size)
        dtype = program.choice((torch.float32, torch.float32, torch.float64, torch.int64))
        parts = [values(rank, length, dtype, seed=n) for rank in range(size)]
        x = parts[mesh.rank].clone()
        kind = program.randrange(6)
        sum(range(own.randrange(20_000)))  # some ranks are late
        if kind <= 1:
            calls.all_reduce(pg, x, op(name), now=program.random() < 0.5).wait()
            expected = reduced(parts, name)
        elif kind == 2:
            calls.reduce(pg, x, root, op(name)).wait()
            expected = reduced(parts, name) if mesh.rank == root else parts[mesh.rank]
        elif kind == 3:
            calls.broadcast(pg, x, root).wait()
            expected = parts[root]
        elif kind == 4:
            out = x.new_empty(size * length)
            calls.all_gather_single(pg, out, x).wait()
            x, expected = out, torch.cat(parts)
        else:  # in place, or as some ranks have it
            mixed = program.randrange(size + 1)
            parts = [part.float() for part in parts]
            x = shared[:length].copy_(parts[mesh.rank]) if mesh.rank < mixed else parts[mesh.rank].clone()
            calls.all_reduce(pg, x, op(name)).wait()
            expected = reduced(parts, name)
        assert same_bits(x, expected), (n, kind, length, name, dtype)
