"""The sum tree: the order in which the leaves of a step are added, on any ranks.

Floating-point addition is not associative, so a sum has the same bits only if it has the same tree. The
tree over G leaves is the left-complete binary tree: a node [lo, hi) splits at the largest power of two
below its length. It depends on G alone. G = 5, three ranks:

                 [0,5)
              /         \\
          [0,4)          |
         /     \\         |
      [0,2)   [2,4)      |
      /  \\    /  \\       |
     0    1  2    3      4
    '--rank 0--'  '-1-'  '2'      rank 0 holds leaves 0, 1, 2: its roots are [0,2) and [2,3)

A rank adds its leaves as far as the tree allows and sends its partial sums, the *roots*: the maximal nodes
whose leaves are all its own, at most 2 log2(G) for a contiguous range. ReproRed (Stelz, Hübner, Stamatakis)
does the same for reductions over data items.

G: number of leaves. W: number of ranks. A node is a half-open range (lo, hi).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def split(lo: int, hi: int) -> int:
    """The split point of node [lo, hi): lo plus the largest power of two below its length."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Whether ``left`` and ``right`` are the two children of one node of the tree over ``num_leaves``."""
    if left[1] != right[0]:
        return False
    lo, hi = 0, num_leaves
    while (lo, hi) != (left[0], right[1]):
        if hi - lo < right[1] - left[0] or hi - lo == 1:
            return False
        middle = split(lo, hi)
        lo, hi = (lo, middle) if left[0] < middle else (middle, hi)
    return split(lo, hi) == left[1]


def roots(leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """The maximal nodes whose leaves are all in ``leaves``, in ascending order."""
    return [node for node, _ in merge([(leaf, leaf + 1) for leaf in leaves], num_leaves)[0]]


def merge(nodes: Sequence[Node], num_leaves: int) -> tuple[list[tuple[Node, int]], list[Node], list[Node]]:
    """Push ``nodes`` on a stack in ascending order, merging siblings at the top.

    Returns the stack, of nodes with the index of their leftmost part, and each merge's indices and node.
    """
    stack: list[tuple[Node, int]] = []
    pairs, merged = [], []
    for node, index in sorted(zip(nodes, range(len(nodes)), strict=True)):
        stack.append((node, index))
        while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], num_leaves):
            (_, hi), right = stack.pop()
            (lo, _), left = stack[-1]
            pairs.append((left, right))
            merged.append((lo, hi))
            stack[-1] = ((lo, hi), left)
    return stack, pairs, merged


@dataclass(frozen=True)
class Sum:
    """How to add the ranks' roots to the root of the tree; roots are numbered rank by rank.

    Rank r has ``counts[r]`` roots. For each (i, j) of ``adds``, in this order, value i becomes value i +
    value j; value i has the lower leaves. The k-th add makes node ``sums[k]``; the last makes value ``root``.
    """

    counts: tuple[int, ...]
    adds: tuple[tuple[int, int], ...]
    sums: tuple[Node, ...]
    root: int


@lru_cache(maxsize=64)
def plan_sum(leaves: tuple[Sequence[int], ...], num_leaves: int) -> Sum:
    """The sum over all ranks, where rank r computed ``leaves[r]``; cached, because every bucket needs it."""
    by_rank = [roots(own, num_leaves) for own in leaves]
    return sum_of([node for own in by_rank for node in own], list(map(len, by_rank)), num_leaves)


def side_by_side(
    leaves: Sequence[Sequence[int]], places: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The leaves of the ranks at ``places`` as those of a tree of their own, and how many it has.

    Ranks that share a micro-batch contribute a leaf each. Of ``places`` 0 to 3:

        micro-batches   rank 0: 0   rank 1: 0   rank 2: 1   rank 3: 1
        leaves                  0           1           2           3
    """
    order = sorted((leaf, rank) for rank, place in enumerate(places) for leaf in leaves[place])
    numbers = {pair: number for number, pair in enumerate(order)}
    found = [[numbers[leaf, rank] for leaf in leaves[place]] for rank, place in enumerate(places)]
    return tuple(map(tuple, found)), len(order)


def sum_of(nodes: Sequence[Node], counts: Sequence[int], num_leaves: int) -> Sum:
    """The sum of roots that are the values of ``nodes``, which must cover all leaves once each."""
    stack, adds, sums = merge(nodes, num_leaves)
    if [node for node, _ in stack] != [(0, num_leaves)]:
        raise ValueError(f"nodes {sorted(nodes)} do not cover the {num_leaves} leaves of the tree once each")
    return Sum(tuple(counts), tuple(adds), tuple(sums), stack[0][1])


class Subtree(NamedTuple):
    """The roots of one host, by their index among the roots of that host, that add up to one node."""

    members: tuple[int, ...]
    plan: Sum


@lru_cache(maxsize=64)
def by_host(plan: Sum, num_local: int) -> tuple[tuple[tuple[Subtree, ...], ...], Sum]:
    """Split ``plan`` into adds within hosts of ``num_local`` consecutive ranks, and adds across hosts.

    First host h adds the subtrees ``[0][h]``, and their sums are the roots of the host. Then the hosts add
    these roots, numbered host by host, by the ``Sum`` in ``[1]``.
    """
    host_of = [rank // num_local for rank, count in enumerate(plan.counts) for _ in range(count)]
    firsts = [host_of.index(host) if host in host_of else 0 for host in range(len(plan.counts) // num_local)]
    members: dict[int, list[int]] = {i: [i] for i in range(len(host_of))}
    within: dict[int, list[tuple[int, int, Node]]] = {i: [] for i in members}
    across: list[tuple[int, int, Node]] = []
    across_hosts: set[int] = set()  # values that include another host's leaves
    for (left, right), node in zip(plan.adds, plan.sums, strict=True):
        if host_of[left] == host_of[right] and not across_hosts & {left, right}:
            members[left] += members.pop(right)
            within[left] += [*within.pop(right), (left, right, node)]
        else:
            across_hosts.add(left)
            across.append((left, right, node))
    numbers = {i: number for number, i in enumerate(sorted(members))}  # of the hosts' roots
    subtrees: list[list[Subtree]] = [[] for _ in firsts]
    for i in numbers:
        index = {member: k for k, member in enumerate(members[i])}
        plan_here = _renumbered((len(index),), within[i], index, i)
        subtrees[host_of[i]].append(Subtree(tuple(m - firsts[host_of[i]] for m in index), plan_here))
    return tuple(map(tuple, subtrees)), _renumbered(tuple(map(len, subtrees)), across, numbers, plan.root)


def _renumbered(
    counts: tuple[int, ...], adds: Sequence[tuple[int, int, Node]], numbers: Mapping[int, int], root: int
) -> Sum:
    """The sum by ``adds`` (left, right, node), with the new ``numbers`` of the values."""
    pairs = tuple((numbers[left], numbers[right]) for left, right, _ in adds)
    return Sum(counts, pairs, tuple(node for _, _, node in adds), numbers[root])


def round_major(num_leaves: int, num_ranks: int) -> list[list[int]]:
    """Leaves by rank in rounds: rank r computes r, r + W, r + 2W, ...

    For strategies that reduce after every round and keep only shards. If W is a power of two, every round is
    one node.
    """
    return [list(range(rank, num_leaves, num_ranks)) for rank in range(num_ranks)]


def rotated(shares: Sequence[T], shift: int) -> tuple[T, ...]:
    """``shares`` by rank, rotated: each rank gets the share of rank + ``shift``, modulo their number."""
    shift %= len(shares)
    return (*shares[shift:], *shares[:shift])


def rank_major(num_leaves: int, num_ranks: int) -> tuple[range, ...]:
    """Leaves by rank in contiguous ranges, cut so that few roots are sent.

    No rank gets more than ceil(G/W) leaves, since the slowest rank sets the pace. Among these cuts: the
    smallest maximum of roots per rank, then the smallest total, then the longest ranges first. If G and W are
    powers of two, every rank has one root, and the exchange moves the bytes of a ring all-reduce; for W = 3,
    G = 16 planning makes it 1.33 times as many instead of 1.67. Ranks beyond the number of leaves get an
    empty range.
    """
    return host_major(num_leaves, 1, num_ranks)


@lru_cache(maxsize=256)
def host_major(num_leaves: int, num_hosts: int, num_local: int) -> tuple[range, ...]:
    """As ``rank_major``, first among hosts of ``num_local`` consecutive ranks, then among the ranks of each.

    Few roots leave a host: for G = 16 on two hosts of three ranks, one root each instead of three, half of
    the bytes.
    """
    num_ranks = num_hosts * num_local
    if num_leaves < 1 or num_ranks < 1:
        raise ValueError(
            f"expected at least one leaf and one rank, got {num_leaves} leaves and {num_ranks} ranks"
        )
    load = -(-num_leaves // num_ranks)
    hosts = _cut(range(num_leaves), num_hosts, load * num_local, num_leaves)
    return tuple(cut for own in hosts for cut in _cut(own, num_local, load, num_leaves))


def _cut(leaves: range, num_ranks: int, load: int, num_leaves: int) -> tuple[range, ...]:
    """``leaves`` of a tree over ``num_leaves`` by rank, at most ``load`` each, with few roots."""
    busy = min(len(leaves), num_ranks)
    plans = (_fewest_roots(leaves, busy, load, limit, num_leaves) for limit in range(1, num_leaves + 1))
    widths = next(widths for widths in plans if widths is not None)
    edges = [*accumulate(widths, initial=leaves.start), *[leaves.stop] * (num_ranks - busy)]
    return tuple(range(lo, hi) for lo, hi in pairwise(edges))


def _fewest_roots(
    leaves: range, num_ranks: int, load: int, limit: int, num_leaves: int
) -> tuple[int, ...] | None:
    """Widths of contiguous ranges with the fewest roots in total and at most ``limit`` each, or None."""
    # best[hi] = (total roots, negated widths) of the best cut of [start, hi) among the first ranks.
    best: dict[int, tuple[int, tuple[int, ...]]] = {leaves.start: (0, ())}
    for rank in range(num_ranks):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        ranks_left = num_ranks - rank - 1
        for lo, (total, widths) in best.items():
            for width in range(1, load + 1):
                hi = lo + width
                if not ranks_left <= leaves.stop - hi <= ranks_left * load:
                    continue
                count = _count_roots(lo, hi, 0, num_leaves)
                if count <= limit:
                    found = (total + count, (*widths, -width))
                    longer[hi] = min(longer.get(hi, found), found)
        best = longer
    return tuple(-width for width in best[leaves.stop][1]) if leaves.stop in best else None


@lru_cache(maxsize=65536)
def _count_roots(lo: int, hi: int, start: int, stop: int) -> int:
    """Number of maximal nodes inside [lo, hi) in the subtree [start, stop)."""
    if lo <= start and stop <= hi:
        return 1
    if stop <= lo or hi <= start:
        return 0
    middle = split(start, stop)
    return _count_roots(lo, hi, start, middle) + _count_roots(lo, hi, middle, stop)
