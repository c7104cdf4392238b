"""Collectives around a ring: every rank sends to its right neighbour only, all of them all the time.

x is cut into W parts, and the parts rotate. Reduce-scatter, W = 3, columns are ranks, [j] is part j:

                 rank 0          rank 1          rank 2
    start        a0 a1 a2        b0 b1 b2        c0 c1 c2
    step 1       sends [2]       sends [0]       sends [1]
                 adds  [1]       adds  [2]       adds  [0]
                 a0 ca a2        b0 b1 ab        bc c1 c2       ca = c1+a1, ab = a2+b2, bc = b0+c0
    step 2       sends [1]       sends [2]       sends [0]
                 adds  [0]       adds  [1]       adds  [2]
                 bca *  *        *  cab *        *  *  abc      rank j owns the sum of part j

All-gather then rotates the finished parts in the same way, without adding. W ranks, x of S bytes:

    operation         steps     bytes each rank sends     time
    reduce_scatter    W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_gather        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_reduce        2(W-1)    2 S (W-1)/W               2 (W-1) alpha + 2 S (W-1)/W beta

No all-reduce sends fewer bytes, and no rank is busier than another; the price is a latency that grows
with W. Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69(2), 2009.

Broadcast of a large tensor scatters it down the binomial tree, then lets the ring pass the parts around. The
tree's root sends all of x log2 W times; here it sends every part once, and the ranks, idle before, do the
rest. W = 4, root 0, x = abcd:

     scatter    0: abcd -> 2: cd       0: ab -> 1: b, 2: cd -> 3: d       each part goes to its owner
     ring       a b c d -> every rank, in W-1 rotations

W ranks, x of S bytes: ceil(log2 W) + W - 1 steps; the root sends at most 2 S (W-1)/W bytes;

    (ceil(log2 W) + W - 1) alpha + 2 S (W-1)/W beta

instead of the tree's ceil(log2 W) (alpha + S beta): better where S is large and W more than two. Source:
van de Geijn's algorithm, as in Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.binomial_tree import children, parent, subtree
from instep.comm.messages import Messages, chunks, edges, flat


def reduce_scatter(parts: Sequence[Tensor], messages: Messages) -> None:
    """``parts[rank]`` becomes the sum over ranks of that part; the others are left with partial sums.

    ``parts`` are W tensors, part j of the same length on every rank. Part j starts at rank j + 1 and ends
    at rank j: (x[j+1] + x[j+2]) + ... + x[j], so each part is added in an order of its own. Needs scratch
    for the longest part.
    """
    rank, size = messages.rank, messages.size
    scratch = parts[0].new_empty(max(part.numel() for part in parts))
    for step in range(size - 1):
        outgoing, incoming = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        received = scratch[: incoming.numel()].view_as(incoming)
        messages.exchange(outgoing, (rank + 1) % size, received, (rank - 1) % size)
        torch.add(received, incoming, out=incoming)


def all_gather(parts: Sequence[Tensor], messages: Messages) -> None:
    """``parts[j]`` of rank j overwrites that of every rank: each rank passes on what it received last."""
    rank, size = messages.rank, messages.size
    for step in range(size - 1):
        outgoing, incoming = parts[(rank - step) % size], parts[(rank - 1 - step) % size]
        messages.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)


def all_reduce(x: Tensor, messages: Messages) -> None:
    """``x`` becomes the sum over ranks: the same bits on every rank, because each part is added only once.

    The order of the adds depends on where in x an element stands and on W.
    """
    parts = chunks(x, messages.size)
    reduce_scatter(parts, messages)
    all_gather(parts, messages)


def broadcast(x: Tensor, messages: Messages, root: int = 0) -> None:
    """``x`` of rank ``root`` overwrites that of every rank."""
    _scatter(x, messages, root)
    parts = chunks(x, messages.size)
    all_gather([parts[(rank - root) % messages.size] for rank in range(messages.size)], messages)


def _scatter(x: Tensor, messages: Messages, root: int) -> None:
    """Part v of ``x`` goes to the v-th rank from ``root``, within one message for all below a child."""
    size = messages.size
    at = edges(x.numel(), size)
    v = (messages.rank - root) % size

    def below(node: int) -> Tensor:
        nodes = subtree(node, size)
        return flat(x)[at[nodes.start] : at[nodes.stop]]

    if v:
        messages.recv(below(v), (parent(v) + root) % size)
    for child in children(v, size):
        messages.send(below(child), (child + root) % size)
