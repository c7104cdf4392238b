"""Collectives around a ring: every rank sends to its right neighbour only, all at the same time.

x is cut into W parts, and the parts rotate. Reduce-scatter, W = 3, columns are ranks, [j] is part j:

                 rank 0          rank 1          rank 2
    start        a0 a1 a2        b0 b1 b2        c0 c1 c2
    step 1       sends [2]       sends [0]       sends [1]
                 adds  [1]       adds  [2]       adds  [0]
                 a0 ca a2        b0 b1 ab        bc c1 c2       ca = c1+a1, ab = a2+b2, bc = b0+c0
    step 2       sends [1]       sends [2]       sends [0]
                 adds  [0]       adds  [1]       adds  [2]
                 bca *  *        *  cab *        *  *  abc      rank j owns the sum of part j

All-gather then rotates the finished parts in the same way, without additions. W ranks, x of S bytes:

    operation         steps     bytes each rank sends     time
    reduce_scatter    W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_gather        W-1       S (W-1)/W                 (W-1) alpha + S (W-1)/W beta
    all_reduce        2(W-1)    2 S (W-1)/W               2 (W-1) alpha + 2 S (W-1)/W beta

No all-reduce sends fewer bytes, and no rank is busier than another; the price is a latency that grows
with W. Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69(2), 2009.

Broadcast of a large tensor scatters it down the binomial tree, then gathers the parts around the ring. The
root of the plain tree sends all of x log2 W times; here it sends every part about twice, and the other ranks,
idle before, do the rest. W = 4, root 0, x = abcd:

     scatter    0: abcd -> 2: cd       0: ab -> 1: b, 2: cd -> 3: d       each part goes to its owner
     ring       a b c d -> every rank, in W-1 rotations

W ranks, x of S bytes: ceil(log2 W) + W - 1 steps; the root sends at most 2 S (W-1)/W bytes;

    (ceil(log2 W) + W - 1) alpha + 2 S (W-1)/W beta

instead of the tree's ceil(log2 W) (alpha + S beta): better where S is large and W more than two. Source:
van de Geijn's algorithm, as in Thakur, Rabenseifner, Gropp 2005 (see ``binomial_tree``), on broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.comm.binomial_tree import children, parent, subtree
from instep.comm.schedule import Piece, Step, Then, exchange, part, receive, send


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Part ``rank`` of x becomes the sum over ranks of that part; the other parts hold partial sums.

    Part j starts at rank j + 1 and ends at rank j: (x[j+1] + x[j+2]) + ... + x[j], so each part is added in
    an order of its own. Needs scratch for the longest part.
    """
    for step in range(size - 1):
        yield _rotation(rank, size, rank - 1 - step, then="received + own")


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Part j of rank j overwrites that of every rank: each rank passes on what it received last."""
    for step in range(size - 1):
        yield _rotation(rank, size, rank - step, then="copy")


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks: the same bits on every rank, because each part is added only once.

    The order of the adds depends on where in x an element stands and on W.
    """
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def broadcast(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 overwrites that of every rank."""
    yield from _scatter(rank, size)
    yield from all_gather(rank, size)


def _rotation(rank: int, size: int, sent: int, then: Then) -> Step:
    """Part ``sent`` goes to the right neighbour, while the part before it comes from the left."""
    outgoing, incoming = part(sent % size, size), part((sent - 1) % size, size)
    return exchange((rank + 1) % size, outgoing, (rank - 1) % size, incoming, then)


def _scatter(rank: int, size: int) -> Iterator[Step]:
    """Part r of x goes to rank r: one message per child, with the parts of its subtree."""

    def below(node: int) -> Piece:
        nodes = subtree(node, size)
        return Piece(nodes.start, nodes.stop, size)

    if rank:
        yield receive(parent(rank), below(rank))
    for child in children(rank, size):
        yield send(child, below(child))
