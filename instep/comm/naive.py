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

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.messages import Messages


def broadcast(x: Tensor, messages: Messages, root: int = 0) -> None:
    """``x`` of rank ``root`` overwrites that of every rank."""
    if messages.rank != root:
        messages.recv(x, root)
        return
    for rank in range(messages.size):
        if rank != root:
            messages.send(x, rank)


def reduce(x: Tensor, messages: Messages, root: int = 0) -> None:
    """``x`` of rank ``root`` becomes the sum over ranks; the others keep theirs.

    Adds in rank order, whichever is the root: ((x0 + x1) + x2) + ... The root needs 2 S bytes of scratch.
    """
    if messages.rank != root:
        messages.send(x, root)
        return
    total, received = torch.empty_like(x), torch.empty_like(x)
    for rank in range(messages.size):
        addend = x if rank == root else messages.recv(received, rank)
        if rank == 0:
            total.copy_(addend)
        else:
            total.add_(addend)
    x.copy_(total)


def all_reduce(x: Tensor, messages: Messages) -> None:
    """``x`` becomes the sum over ranks, added in rank order by rank 0: the same bits on every rank."""
    reduce(x, messages)
    broadcast(x, messages)


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
