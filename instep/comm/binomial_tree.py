"""Collectives along a binomial tree: ranks that have the data help to spread it, so W-1 steps become log2 W.

Rank v counts from the root, which is 0. The parent of v is v without its lowest set bit. W = 6:

        0                   children(0) = 4, 2, 1
      / | \\                 children(4) = 5
     4  2  1                children(2) = 3
     |  |
     5  3                   the tree below v is a range: [4, 6), [2, 4), [1, 2)

     step 1      step 2      step 3        broadcast
     0 -> 4      0 -> 2      0 -> 1
                 4 -> 5*     2 -> 3        * as soon as it has it

A node serves its largest subtree first, so a broadcast takes ceil(log2 W) steps: while the root serves its
next child, the children served before serve theirs. Reduce runs the same tree upwards. W ranks, x of S
bytes, L = ceil(log2 W):

    operation     steps     bytes the busiest rank sends     time
    broadcast     L         L S                              L (alpha + S beta)
    reduce        L         S                                L (alpha + S beta)
    all_reduce    2L        L S                              2 L (alpha + S beta)

Best for small x. For large x, L S beta is too much: the root sends all of x L times, though no rank needs it
more than once. Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations
in MPICH", IJHPCA 19(1), 2005, on broadcast and reduce.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.comm.schedule import Step, receive, send


def broadcast(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 overwrites that of every rank."""
    if rank:
        yield receive(parent(rank))
    for child in children(rank, size):
        yield send(child)


def reduce(rank: int, size: int) -> Iterator[Step]:
    """x of rank 0 becomes the sum over ranks; x of the other ranks is left with partial sums.

    Adds neighbours, then pairs of neighbours, and so on, the lower one on the left, counted from the root:
    W = 5 is ((x0 + x1) + (x2 + x3)) + x4, the left-complete binary tree over ranks. Needs S bytes
    of scratch on ranks that have children.
    """
    for child in reversed(children(rank, size)):
        yield receive(child, then="own + received")
    if rank:
        yield send(parent(rank))


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """x becomes the sum over ranks in the order of ``reduce``: the same bits on every rank."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def parent(v: int) -> int:
    """The parent of v, which is not the root."""
    return v & (v - 1)


def children(v: int, size: int) -> list[int]:
    """The children of v, largest subtree first."""
    level = (size - 1).bit_length() if v == 0 else (v & -v).bit_length() - 1
    return [v + (1 << k) for k in reversed(range(level)) if v + (1 << k) < size]


def subtree(v: int, size: int) -> range:
    """v and its descendants."""
    return range(v, min(v + (v & -v), size) if v else size)
