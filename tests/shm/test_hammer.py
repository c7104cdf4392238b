"""Thousands of small operations between processes: no word is read before the data that it announces."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from tests.world import world

TIMES = 1000
# Of int64: around a cache line, a page, and where sums begin to be cut into slices.
LENGTHS = (0, 1, 2, 7, 8, 9, 31, 512, 513, 4099)


@world(4, by="process", backend="shm", timeout_s=20)
def test_four_processes_hammer(mesh):
    hammer(mesh.rank, 4, random.Random(2))


def hammer(me: int, count: int, plan: random.Random) -> None:
    """Every value says which operation and which rank it is of. ``plan`` is the same on every rank."""
    ranks = range(count)
    shared = dist.group.WORLD.allocate(8 * LENGTHS[-1]).elements(torch.int64)
    for n in range(TIMES):
        length = plan.choice(LENGTHS)
        x = torch.full((length,), 100 * n + me)
        match plan.randrange(4):
            case 0:
                dist.all_reduce(x)
                expected = [sum(100 * n + rank for rank in ranks)]
            case 1:
                x = shared[:length].copy_(x)
                dist.all_reduce(x)
                expected = [sum(100 * n + rank for rank in ranks)]
            case 2:
                root = plan.randrange(count)
                dist.broadcast(x, root)
                expected = [100 * n + root]
            case _:
                out = torch.empty_like(x)
                sent = dist.isend(x, (me + 1) % count)
                dist.recv(out, (me - 1) % count)
                sent.wait()
                x, expected = out, [100 * n + (me - 1) % count]
        blocks = torch.tensor(expected).unsqueeze(1).expand(-1, length)
        assert torch.equal(x.view(len(expected), length), blocks), n
