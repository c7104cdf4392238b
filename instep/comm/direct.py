"""Collectives without a detour: every rank sends each other rank exactly the part that rank needs.

Reduce-scatter, W = 3: all messages at once, none waits for another.

     rank 0: a0 a1 a2      a1 -> rank 1, a2 -> rank 2        rank 0 has a0 b0 c0, adds in rank order
     rank 1: b0 b1 b2      b0 -> rank 0, b2 -> rank 2        rank 1 has a1 b1 c1
     rank 2: c0 c1 c2      c0 -> rank 0, c1 -> rank 1        rank 2 has a2 b2 c2

As many bytes and messages as the ring, but nothing is added before everything has arrived: the order of
the adds is free to choose, and here it is rank order for every element. W ranks, x of S bytes:

    operation         steps     bytes each rank sends     time
    all_to_all        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    reduce_scatter    W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_gather        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_reduce        2(W-1)    2 S (W-1)/W               2 (W-1) alpha + 2 S (W-1)/W beta

The times assume that a rank sends one message after the other; where latencies overlap, a rank waits for
one alpha, not W-1. The price is scratch for W-1 parts (the ring: one), and W-1 connections
in use at a time. Source: Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on all-to-all
and, as pairwise exchange, on reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.comm.schedule import Step, part


def all_to_all(rank: int, size: int) -> Iterator[Step]:
    """Part s of rank r becomes part r of rank s, in other memory (``out`` of ``perform``)."""
    others = _others(rank, size)
    yield Step(
        sends=[(to, part(to, size)) for to in others],
        receives=[(source, part(source, size)) for source in reversed(others)],
    )


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Part ``rank`` of x becomes the sum over ranks of that part, ((x0 + x1) + x2) + ...; the others stay."""
    others = _others(rank, size)
    own = part(rank, size)
    yield Step(
        sends=[(to, part(to, size)) for to in others],
        receives=[(source, own) for source in reversed(others)],
        then="in rank order",
    )


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Part j of rank j overwrites that of every rank."""
    others = _others(rank, size)
    yield Step(
        sends=[(to, part(rank, size)) for to in others],
        receives=[(source, part(source, size)) for source in reversed(others)],
    )


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks, every element added in rank order: the same bits on every rank."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def _others(rank: int, size: int) -> list[int]:
    """The ranks 1, 2, ... to the right: in their k-th messages all ranks send to different ones."""
    return [(rank + k) % size for k in range(1, size)]
