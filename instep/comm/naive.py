"""Collectives as one would first write them: the root deals with every other rank in turn.

     0 --x--> 1            broadcast, W = 4: three messages of S bytes, one after the other, all of
     0 --x--> 2            them through the root's connection while the others are idle
     0 --x--> 3

W ranks, x of S bytes; alpha: seconds per message, beta: seconds per byte.

    operation     steps     bytes the busiest rank sends     time
    broadcast     W-1       (W-1) S                          (W-1) (alpha + S beta)
    reduce        W-1       S; the root receives (W-1) S     (W-1) (alpha + S beta)
    all_reduce    2(W-1)    (W-1) S                          2 (W-1) (alpha + S beta)
    scatter       W-1       S (W-1)/W                        (W-1) alpha + S (W-1)/W beta
    gather        W-1       S/W                              (W-1) alpha + S (W-1)/W beta

Scatter and gather cannot be beaten in bytes: the root has to send or receive all parts but its own. The
others can, in both columns. The names are MPI's ("MPI: A Message-Passing Interface Standard", chapter on
collective communication).
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.comm.schedule import Step, part, receive, send


def broadcast(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 overwrites that of every rank."""
    if rank:
        yield receive(0)
    else:
        for other in range(1, size):
            yield send(other)


def reduce(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 becomes the sum over ranks, ((x0 + x1) + x2) + ... counted from the root; the others stay.

    The root needs S bytes of scratch.
    """
    if rank:
        yield send(0)
    else:
        for other in range(1, size):
            yield receive(other, then="own + received")


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks, added in rank order by rank 0: the same bits on every rank."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def scatter(rank: int, size: int) -> Iterator[Step]:
    """Part r of rank 0 overwrites part r of rank r."""
    if rank:
        yield receive(0, part(rank, size))
    else:
        for other in range(1, size):
            yield send(other, part(other, size))


def gather(rank: int, size: int) -> Iterator[Step]:
    """Part r of rank r overwrites part r of rank 0."""
    if rank:
        yield send(0, part(rank, size))
    else:
        for other in range(1, size):
            yield receive(other, part(other, size))
