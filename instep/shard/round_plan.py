"""How the owner of a slice adds it up, round after round, in the order of the sum tree. Arithmetic only.

A rank that keeps its slice of the gradient alone cannot wait until each has added its own micro-batches: that
would be a whole gradient each. So ranks take turns: round j is micro-batches jW to jW + W - 1, one per rank,
the leaves of the tree, and after each the owner of a slice has that slice of W more leaves. It adds them as
far as the tree allows. Slice 0 of every leaf on rank 0, for G = 6, W = 2:

    round 0   0 1         [0,2)                     one partial sum is kept
    round 1   2 3         [0,4)
    round 2   4 5         [0,4) + [4,6) = [0,6)     the root

What is kept between rounds are the digits of a binary counter, log2(G / W) + 1 slices at most for W a power
of two. With other W a round's leaves belong to several nodes, and some more are kept.

Where there are several shard groups of W ranks, each has a contiguous range of leaves, and takes turns among
its own ranks. It then ends with the few roots of its range, as a rank does in ``reduce.tree``; one that has
no leaf any more goes on with empty rounds, until all have ended.

G: micro-batches in the step. W: ranks of a shard group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from instep.reduce.tree import Node, Sum, merge, rank_major, rotated, round_major


class Round(NamedTuple):
    """What the owner does in one round. Values are the kept sums in order, then the round's ``leaves``.

    ``senders`` are the ranks that have a leaf, in the order of their ``leaves``. Then value ``sums[d].root``
    is kept as number d, and is the sum of ``nodes[d]``; a sum that was kept before stays at its number.
    """

    senders: tuple[int, ...]
    leaves: range
    sums: tuple[Sum, ...]
    nodes: tuple[Node, ...]


def ranges(num_leaves: int, num_ranks: int, num_shard_groups: int, shift: int = 0) -> tuple[range, ...]:
    """Leaves by shard group; with ``shift``, see ``deal``, each has those of a later one."""
    return rotated(rank_major(num_leaves, num_shard_groups), shift // num_ranks)


def deal(num_leaves: int, num_ranks: int, num_shard_groups: int = 1, shift: int = 0) -> list[list[int]]:
    """Leaves by rank, the ranks of a shard group one after the other.

    With ``shift`` each rank has those of the one so many after it in its shard group; beyond W of a rank in
    the next shard group. So up to W times the number of shard groups, a leaf is another rank's each time.
    """
    return [
        [own[i] for i in turns]
        for own in ranges(num_leaves, num_ranks, num_shard_groups, shift)
        for turns in rotated(round_major(len(own), num_ranks), shift % num_ranks)
    ]


@lru_cache(maxsize=64)
def plan_rounds(
    num_leaves: int, num_ranks: int, num_shard_groups: int = 1, shard_group: int = 0, shift: int = 0
) -> tuple[Round, ...]:
    """All rounds of a step in a shard group; the last keeps the roots of its leaves: one, if they are all.

    ``shift`` as for ``deal``: it moves leaves to other senders, and no value to another place in a sum.
    """
    by_group = ranges(num_leaves, num_ranks, num_shard_groups, shift)
    rounds: list[Round] = []
    nodes: tuple[Node, ...] = ()
    for start in range(0, max(map(len, by_group)), num_ranks):
        leaves = by_group[shard_group][start : start + num_ranks]
        senders = tuple((k - shift) % num_ranks for k in range(len(leaves)))
        rounds.append(_plan(nodes, leaves, num_leaves, senders))
        nodes = rounds[-1].nodes
    return tuple(rounds)


def _plan(nodes: Sequence[Node], leaves: range, num_leaves: int, senders: tuple[int, ...]) -> Round:
    stack, adds, made = merge([*nodes, *((leaf, leaf + 1) for leaf in leaves)], num_leaves)
    sums = []
    for (lo, hi), root in stack:
        own = [k for k, node in enumerate(made) if lo <= node[0] and node[1] <= hi]
        sums.append(Sum((), tuple(adds[k] for k in own), tuple(made[k] for k in own), root))
    return Round(senders, leaves, tuple(sums), tuple(node for node, _ in stack))
