"""The binomial tree over W ranks: who is whose parent, arithmetic only.

Rank v counts from the root, which is 0. Its parent is v without its lowest bit that is set. W = 6:

        0                   children(0) = 4, 2, 1
      / | \\                 children(4) = 5
     4  2  1                children(2) = 3
     |  |
     5  3                   the tree below v is a range: [4, 6), [2, 4), [1, 2)

A node's largest subtree comes first, so going down the tree takes ceil(log2 W) steps: while the root
serves its next child, those that have been served serve theirs.
"""

from __future__ import annotations


def depth(size: int) -> int:
    """Steps from the root to everybody: ceil(log2 W)."""
    return (size - 1).bit_length()


def parent(v: int) -> int:
    """Whom v, which is not the root, hangs below."""
    return v & (v - 1)


def children(v: int, size: int) -> list[int]:
    """Who hangs directly below v, the largest subtree first."""
    level = depth(size) if v == 0 else (v & -v).bit_length() - 1
    return [v + (1 << k) for k in reversed(range(level)) if v + (1 << k) < size]


def subtree(v: int, size: int) -> range:
    """v and everybody below it."""
    return range(v, min(v + (v & -v), size) if v else size)
