"""Collectives without a detour: every rank sends each other rank exactly what that one needs.

Reduce-scatter, W = 3: all messages at once, none waits for another.

     rank 0: a0 a1 a2      a1 -> rank 1, a2 -> rank 2        rank 0 has a0 b0 c0, adds in rank order
     rank 1: b0 b1 b2      b0 -> rank 0, b2 -> rank 2        rank 1 has a1 b1 c1
     rank 2: c0 c1 c2      c0 -> rank 0, c1 -> rank 1        rank 2 has a2 b2 c2

As many bytes and messages as the ring, but nothing is added before everything has arrived: the order of
the adds is free to choose, and here is the same for every element. W ranks, x of S bytes:

    operation         steps     bytes each rank sends     time
    all_to_all        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    reduce_scatter    W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_gather        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_reduce        2(W-1)    2 S (W-1)/W               2 (W-1) alpha + 2 S (W-1)/W beta

The times are those of a rank that sends one message after the other; where latency overlaps, what is
waited for is one alpha, not W-1. The price is scratch for W-1 parts (the ring: one), and W-1 connections
in use at a time. Source: Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on all-to-all
and, as pairwise exchange, on reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.messages import Messages, chunks


def all_to_all(parts: Sequence[Tensor], messages: Messages, out: Sequence[Tensor]) -> None:
    """``out[s]`` of rank r becomes ``parts[r]`` of rank s. Lengths may differ from pair to pair, and be 0."""
    out[messages.rank].copy_(parts[messages.rank])
    others = _others(messages)
    messages.together(
        [(parts[to], to) for to in others], [(out[source], source) for source in reversed(others)]
    )


def reduce_scatter(parts: Sequence[Tensor], messages: Messages) -> None:
    """``parts[rank]`` becomes the sum over ranks of that part, ((x0 + x1) + x2) + ...; the others stay.

    ``parts`` are W tensors, part j of the same length on every rank.
    """
    rank, own = messages.rank, parts[messages.rank]
    others = _others(messages)
    addends = [own if source == rank else torch.empty_like(own) for source in range(messages.size)]
    messages.together(
        [(parts[to], to) for to in others], [(addends[source], source) for source in reversed(others)]
    )
    total = addends[0]
    for addend in addends[1:]:
        total.add_(addend)
    own.copy_(total)


def all_gather(parts: Sequence[Tensor], messages: Messages) -> None:
    """``parts[j]`` of rank j overwrites that of every rank."""
    others = _others(messages)
    own = parts[messages.rank]
    messages.together([(own, to) for to in others], [(parts[source], source) for source in reversed(others)])


def all_reduce(x: Tensor, messages: Messages) -> None:
    """``x`` becomes the sum over ranks, every element added in rank order: the same bits on every rank."""
    parts = chunks(x, messages.size)
    reduce_scatter(parts, messages)
    all_gather(parts, messages)


def _others(messages: Messages) -> list[int]:
    """Who is 1, 2, ... to the right: in its k-th message each rank sends to another one."""
    return [(messages.rank + k) % messages.size for k in range(1, messages.size)]
