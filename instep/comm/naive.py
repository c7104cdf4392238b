"""Collectives as one would first write them: the root deals with every other rank in turn.

     0 --x--> 1            broadcast, W = 4: three messages of S bytes, one after the other, all of
     0 --x--> 2            them through the root's connection while the others are idle
     0 --x--> 3

W ranks, x of S bytes; alpha: seconds a message, beta: seconds a byte.

    operation     steps     bytes the busiest rank sends     time
    broadcast     W-1       (W-1) S                          (W-1) (alpha + S beta)
    reduce        W-1       S; the root receives (W-1) S     (W-1) (alpha + S beta)
    all_reduce    2(W-1)    (W-1) S                          2 (W-1) (alpha + S beta)
    scatter       W-1       S (W-1)/W                        (W-1) alpha + S (W-1)/W beta
    gather        W-1       S/W                              (W-1) alpha + S (W-1)/W beta

Scatter and gather cannot be beaten in bytes: the root has to send or receive all parts but its own. The
others can, in both columns. The names are those of MPI ("MPI: A Message-Passing Interface Standard",
chapter on collective communication).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from instep.comm.schedule import Step, receive, send

if TYPE_CHECKING:  # who sends what to whom is arithmetic, which ``instep show`` prints without torch
    from torch import Tensor

    from instep.comm.messages import Messages


def broadcast(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 overwrites that of every rank."""
    if rank:
        yield receive(0)
    else:
        for other in range(1, size):
            yield send(other)


def reduce(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 becomes the sum over ranks; the others keep theirs.

    Adds in rank order, whichever is the root: ((x0 + x1) + x2) + ... The root needs S bytes of scratch, and S
    more for each addend that comes before its turn.
    """
    if rank:
        yield send(0)
    else:
        for other in range(1, size):
            yield receive(other, then="in rank order")


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks, added in rank order by rank 0: the same bits on every rank."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def scatter(parts: Sequence[Tensor], messages: Messages, out: Tensor, root: int = 0) -> None:
    """``out`` of rank r becomes ``parts[r]`` of rank ``root``; the others' ``parts`` may be empty."""
    if messages.rank != root:
        messages.recv(out, root)
        return
    for rank, part in enumerate(parts):
        if rank == root:
            out.copy_(part)
        else:
            messages.send(part, rank)


def gather(x: Tensor, messages: Messages, parts: Sequence[Tensor], root: int = 0) -> None:
    """``parts[r]`` of rank ``root`` becomes ``x`` of rank r; the others' ``parts`` may be empty."""
    if messages.rank != root:
        messages.send(x, root)
        return
    for rank, part in enumerate(parts):
        if rank == root:
            part.copy_(x)
        else:
            messages.recv(part, rank)
