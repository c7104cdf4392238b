"""Drawn programs of operations on one group: each gives what it is defined as, computed by numpy.

Everything is drawn: kind, dtype, length, reduction, root, at once or async, how the tensors lie in memory, in
which order works are waited for, and which ranks are late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.shm import calls
from tests.shm.calls import group_of
from tests.shm.conftest import SMALL_BYTES
from tests.shm.numbers import FLOATS, INTEGERS, MOVED, REDUCTIONS, defined, op, reduced, same_bits, values
from tests.world import world

# Of float32: around what is added at once, what one piece holds, and several times as much as both halves.
LENGTHS = (0, 1, 15, 16, 17, 1023, 2048, 2049, 3000, SMALL_BYTES // 4, 8192, 8193, 20_011)
Check = tuple[Any, Sequence[Tensor], Sequence[Tensor]]  # work, what is found, what is expected


class Draw:
    """One operation: ``program`` draws the same on every rank, ``own`` on this one."""

    def __init__(self, pg: Any, number: int, program: random.Random, own: random.Random) -> None:
        self.pg, self.number, self.program, self.own = pg, number, program, own
        self.size, self.me = pg.getSize(), pg.getRank()
        self.length, self.root = program.choice(LENGTHS), program.randrange(self.size)
        self.dtype, self.now = program.choice((*MOVED, torch.float32)), program.random() < 0.5
        self.is_root = self.root == self.me

    def reduction(self) -> str:
        """A reduction, and a dtype that has it."""
        self.dtype = self.program.choice((*FLOATS, *INTEGERS, torch.bool, torch.float32, torch.float32))
        return self.program.choice([name for name in REDUCTIONS if defined(name, self.dtype)])

    def parts(self, length: int | None = None) -> list[Tensor]:
        """What each rank has."""
        length = self.length if length is None else length
        return [values(rank, length, self.dtype, seed=self.number) for rank in range(self.size)]

    def laid(self, x: Tensor, kind: int | None = None) -> Tensor:
        """The elements of ``x`` in memory of some kind."""
        match self.own.randrange(6) if kind is None else kind:
            case 0:
                return torch.zeros(2 * len(x), dtype=x.dtype)[::2].copy_(x)
            case 1 if len(x) % 4 == 0:
                return torch.zeros(len(x) // 4, 4, dtype=x.dtype).t().copy_(x.view(4, -1))
            case 2 if x.dtype.is_floating_point:
                return nn.Parameter(x.clone())
            case 2 if x.is_complex():
                return x.conj().resolve_conj().conj()
            case 3 if kind is None and x.dtype.is_floating_point:
                return torch._neg_view(-x)
            case 3 | 4:
                return self.pg.allocate(x.nbytes + 64).elements(x.dtype)[1 : 1 + len(x)].copy_(x)
        return x.clone()

    def empty(self, length: int) -> Tensor:
        return self.laid(torch.ones(length, dtype=self.dtype))


def all_reduce(draw: Draw) -> Check:
    name, parts = draw.reduction(), draw.parts()
    x = draw.laid(parts[draw.me], 3 if draw.program.random() < 0.4 else None)  # all in shared memory
    return calls.all_reduce(draw.pg, x, op(name), now=draw.now), [x], [reduced(parts, name)]


def reduce(draw: Draw) -> Check:
    name, parts = draw.reduction(), draw.parts()
    x = draw.laid(parts[draw.me])
    work = calls.reduce(draw.pg, x, draw.root, op(name), now=draw.now)
    return work, [x], [reduced(parts, name) if draw.is_root else parts[draw.me]]


def broadcast(draw: Draw) -> Check:
    x = draw.laid(draw.parts()[draw.me])
    return calls.broadcast(draw.pg, x, draw.root, now=draw.now), [x], [draw.parts()[draw.root]]


def all_gather(draw: Draw) -> Check:
    outs = [draw.empty(draw.length) for _ in range(draw.size)]
    return calls.all_gather(draw.pg, outs, draw.laid(draw.parts()[draw.me]), now=draw.now), outs, draw.parts()


def all_gather_single(draw: Draw) -> Check:
    out, x = draw.empty(draw.size * draw.length), draw.laid(draw.parts()[draw.me])
    return calls.all_gather_single(draw.pg, out, x, now=draw.now), [out], [torch.cat(draw.parts())]


def gather(draw: Draw) -> Check:
    outs = [draw.empty(draw.length) for _ in range(draw.size)] if draw.is_root else []
    work = calls.gather(draw.pg, outs, draw.laid(draw.parts()[draw.me]), draw.root, now=draw.now)
    return work, outs, draw.parts() if draw.is_root else []


def gather_single(draw: Draw) -> Check:
    out = draw.empty(draw.size * draw.length if draw.is_root else 0)
    work = calls.gather_single(draw.pg, out, draw.laid(draw.parts()[draw.me]), draw.root, now=draw.now)
    return work, [out], [torch.cat(draw.parts()) if draw.is_root else torch.zeros(0, dtype=draw.dtype)]


def scatter(draw: Draw) -> Check:
    out, xs = draw.empty(draw.length), [draw.laid(x) for x in draw.parts()] if draw.is_root else []
    return calls.scatter(draw.pg, out, xs, draw.root, now=draw.now), [out], [draw.parts()[draw.me]]


def reduce_scatter(draw: Draw) -> Check:
    name, wholes = draw.reduction(), draw.parts(draw.size * draw.length)
    out, x = draw.empty(draw.length), wholes[draw.me]
    expected = reduced(wholes, name).view(draw.size, -1)[draw.me]
    if draw.program.random() < 0.5:
        work = calls.reduce_scatter_single(draw.pg, out, draw.laid(x), op(name), now=draw.now)
    else:
        rows = [draw.laid(row) for row in x.view(draw.size, -1)]
        work = calls.reduce_scatter(draw.pg, out, rows, op(name), now=draw.now)
    return work, [out], [expected]


def all_to_all(draw: Draw) -> Check:
    """Lengths of all pairs are drawn; some are 0."""
    ranks = range(draw.size)
    table = [[draw.program.choice((0, 1, 7, draw.length // 4)) for _ in ranks] for _ in ranks]
    sent = [values(draw.me * 10 + r, table[draw.me][r], draw.dtype, seed=draw.number) for r in ranks]
    expected = [values(r * 10 + draw.me, table[r][draw.me], draw.dtype, seed=draw.number) for r in ranks]
    if draw.program.random() < 0.5:
        outs = [draw.empty(len(x)) for x in expected]
        return calls.all_to_all(draw.pg, outs, [draw.laid(x) for x in sent], now=draw.now), outs, expected
    out = torch.zeros(sum(map(len, expected)), dtype=draw.dtype)
    splits = [len(x) for x in expected]
    work = calls.all_to_all_single(draw.pg, out, torch.cat(sent), splits, table[draw.me], now=draw.now)
    return work, [out], [torch.cat(expected)]


def all_to_all_equal(draw: Draw) -> Check:
    wholes, out = draw.parts(draw.size * draw.length), draw.empty(draw.size * draw.length)
    expected = torch.cat([whole.view(draw.size, -1)[draw.me] for whole in wholes])
    return calls.all_to_all_single(draw.pg, out, draw.laid(wholes[draw.me]), now=draw.now), [out], [expected]


def coalesced(draw: Draw) -> Check:
    """Several tensors in one call; perhaps none."""
    draw.dtype = torch.float32
    by_length = [draw.parts(n * draw.size) for n in LENGTHS[: draw.program.randrange(4)]]
    mine, sums = [parts[draw.me].clone() for parts in by_length], [reduced(p, "sum") for p in by_length]
    match draw.program.randrange(4):
        case 0:
            return draw.pg.allreduce_coalesced(mine), mine, sums
        case 1:
            outs = [draw.empty(draw.size * len(x)) for x in mine]
            work = draw.pg.allgather_into_tensor_coalesced(outs, mine)
            return work, outs, list(map(torch.cat, by_length))
        case 2:
            lists = [[draw.empty(len(x)) for x in mine] for _ in range(draw.size)]
            flat = [x for xs in lists for x in xs]
            expected = [parts[r] for r in range(draw.size) for parts in by_length]
            return draw.pg.allgather_coalesced(lists, mine), flat, expected
    shares = [draw.empty(len(x) // draw.size) for x in mine]
    expected = [total.view(draw.size, -1)[draw.me] for total in sums]
    return draw.pg.reduce_scatter_tensor_coalesced(shares, mine), shares, expected


def ring(draw: Draw) -> Check:
    """Every rank sends to the next one; a group of one has none."""
    if draw.size == 1:
        return calls.barrier(draw.pg, now=draw.now), [], []
    source, out = (draw.me - 1) % draw.size, draw.empty(draw.length)
    draw.pg.send([draw.laid(draw.parts()[draw.me])], (draw.me + 1) % draw.size, draw.number).wait()
    work = (
        draw.pg.recv([out], source, draw.number) if draw.now else draw.pg.recv_anysource([out], draw.number)
    )
    return work, [out], [draw.parts()[source]]


KINDS: Sequence[Callable[[Draw], Check]] = (
    *(all_reduce, all_reduce, all_reduce, reduce, broadcast, all_gather, all_gather_single, gather),
    *(gather_single, scatter, reduce_scatter, all_to_all, all_to_all_equal, coalesced, ring),
)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))]
)
def test_operations_follow_each_other_in_any_order(size, seed, small_halves):
    world(size, backend="shm", timeout_s=20)(follows)(seed=seed)


def follows(mesh, seed):
    pg, program, own = group_of(mesh), random.Random(seed), random.Random(100 * seed + mesh.rank)
    pending: list[tuple[str, Check]] = []
    for n in range(90):
        kind = program.choice(KINDS)
        draw = Draw(pg, n, program, own)
        sum(range(own.randrange(20_000)))  # some ranks are late
        pending.append((f"{n} {kind.__name__}, seed {seed}, {draw.length} {draw.dtype}", kind(draw)))
        if own.random() < 0.2 or n == 89:
            own.shuffle(pending)
            for what, (work, found, expected) in pending:
                assert work.wait(), what
                for x, right in zip(found, expected, strict=True):
                    assert same_bits(x.detach().reshape(-1), right), what
            pending.clear()
