"""The sum tree: in which order the leaves of a step are added, wherever they are.

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

A rank adds its leaves as far as the tree allows and sends the *roots* of what it has: the maximal nodes
whose leaves are all its own, at most 2 log2(G) for a contiguous range. Same idea as ReproRed (Stelz,
Hübner, Stamatakis) for reductions over data items.

G: number of leaves. W: number of ranks. A node is a half-open range (lo, hi).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def split(lo: int, hi: int) -> int:
    """Where node [lo, hi) divides: after the largest power of two of leaves below its length."""
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
    """The maximal nodes whose leaves are all in ``leaves``, in ascending order.

    This is what a binary counter leaves on its stack: push a leaf, and while the two top entries are
    siblings, merge them.
    """
    stack: list[Node] = []
    for leaf in sorted(leaves):
        stack.append((leaf, leaf + 1))
        while len(stack) > 1 and are_siblings(stack[-2], stack[-1], num_leaves):
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
    return stack


def adds(nodes: Sequence[Node], num_leaves: int) -> list[tuple[int, int]]:
    """How to add values of ``nodes``, which cover all leaves, to the root.

    Returns pairs (i, j) of positions in ``nodes``: value i becomes value i + value j, in this order. The
    left operand is always the one with the lower leaves; the last value standing, the root, is that of
    the node with leaf 0.
    """
    stack: list[tuple[Node, int]] = []
    plan = []
    for node, position in sorted(zip(nodes, range(len(nodes)), strict=True)):
        stack.append((node, position))
        while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], num_leaves):
            (_, hi), right = stack.pop()
            (lo, _), left = stack[-1]
            plan.append((left, right))
            stack[-1] = ((lo, hi), left)
    if [node for node, _ in stack] != [(0, num_leaves)]:
        raise ValueError(f"nodes {sorted(nodes)} do not cover the {num_leaves} leaves of the tree once each")
    return plan


@dataclass(frozen=True)
class Sum:
    """How the ranks' roots become the root of the tree; roots are numbered through, rank by rank.

    ``counts[r]`` roots are rank r's; ``adds`` are those of ``adds``, and ``sums[k]`` is the node that number
    k of them makes; the sum ends up in number ``root``.
    """

    counts: tuple[int, ...]
    adds: tuple[tuple[int, int], ...]
    sums: tuple[Node, ...]
    root: int


def plan_sum(leaves: Sequence[Sequence[int]], num_leaves: int) -> Sum:
    """The sum over all ranks, of which rank r holds ``leaves[r]``; kept, because every bucket asks anew."""
    try:
        return _plan_sum(tuple(leaves), num_leaves)  # a range is compared without its numbers
    except TypeError:  # lists
        return _plan_sum(tuple(map(tuple, leaves)), num_leaves)


@lru_cache(maxsize=64)
def _plan_sum(leaves: tuple[Sequence[int], ...], num_leaves: int) -> Sum:
    by_rank = [roots(own, num_leaves) for own in leaves]
    nodes = [node for own in by_rank for node in own]
    counts = tuple(len(own) for own in by_rank)
    return sum_of(nodes, counts, num_leaves)


def sum_of(nodes: Sequence[Node], counts: Sequence[int], num_leaves: int) -> Sum:
    """The sum of roots that are the values of ``nodes``."""
    values, sums = list(nodes), []
    plan = adds(nodes, num_leaves)
    for left, right in plan:
        values[left] = values[left][0], values[right][1]
        sums.append(values[left])
    return Sum(tuple(counts), tuple(plan), tuple(sums), nodes.index(min(nodes)))


class Subtree(NamedTuple):
    """The roots of one host, by their place among all of that host's, that add up to one node of the tree."""

    members: tuple[int, ...]
    plan: Sum


@lru_cache(maxsize=64)
def by_host(plan: Sum, num_local: int) -> tuple[tuple[tuple[Subtree, ...], ...], Sum]:
    """``plan`` in two stages, where each host has ``num_local`` ranks in a row.

    First every host adds what its ranks' roots make among themselves: host h the subtrees in ``[0][h]``,
    whose sums are the host's roots. Then those, numbered through host by host, by the ``Sum`` in ``[1]``.
    """
    host_of = [rank // num_local for rank, count in enumerate(plan.counts) for _ in range(count)]
    firsts = [host_of.index(host) if host in host_of else 0 for host in range(len(plan.counts) // num_local)]
    members: dict[int, list[int]] = {i: [i] for i in range(len(host_of))}
    within: dict[int, list[tuple[int, int, Node]]] = {i: [] for i in members}
    across: list[tuple[int, int, Node]] = []
    travels: set[int] = set()  # what has been added to another host's
    for (left, right), node in zip(plan.adds, plan.sums, strict=True):
        if host_of[left] == host_of[right] and not travels & {left, right}:
            members[left] += members.pop(right)
            within[left] += [*within.pop(right), (left, right, node)]
        else:
            travels.add(left)
            across.append((left, right, node))
    numbers = {i: number for number, i in enumerate(sorted(members))}  # of the hosts' roots
    subtrees: list[list[Subtree]] = [[] for _ in firsts]
    for i in numbers:
        places = {member: place for place, member in enumerate(members[i])}
        first = firsts[host_of[i]]
        subtrees[host_of[i]].append(
            Subtree(
                tuple(member - first for member in places),
                _renumbered((len(places),), within[i], places, i),
            )
        )
    return tuple(map(tuple, subtrees)), _renumbered(tuple(map(len, subtrees)), across, numbers, plan.root)


def _renumbered(
    counts: tuple[int, ...], added: Sequence[tuple[int, int, Node]], numbers: Mapping[int, int], root: int
) -> Sum:
    """The sum of (left, right, node), whose values have other ``numbers`` now."""
    return Sum(
        counts,
        tuple((numbers[left], numbers[right]) for left, right, _ in added),
        tuple(node for _, _, node in added),
        numbers[root],
    )


def round_major(num_leaves: int, num_ranks: int) -> list[list[int]]:
    """Leaves by rank when ranks take turns: rank r computes r, r + W, r + 2W, ...

    For strategies that reduce after every round and keep only shards; with W a power of two every round
    is one node.
    """
    return [list(range(rank, num_leaves, num_ranks)) for rank in range(num_ranks)]


def rotated(shares: Sequence[T], shift: int) -> tuple[T, ...]:
    """``shares`` by rank, where each rank has the one of the rank that is ``shift`` after it, in a ring."""
    shift %= len(shares)
    return (*shares[shift:], *shares[:shift])


@lru_cache(maxsize=256)
def rank_major(num_leaves: int, num_ranks: int) -> tuple[range, ...]:
    """Leaves by rank in contiguous ranges, cut so that few roots have to travel.

    No rank gets more than ceil(G/W) leaves, since the slowest rank sets the pace; among those cuts the
    one with the smallest maximum of roots per rank, then the smallest total, then the longest ranges
    first. With G and W powers of two every rank has one root and the exchange moves what a ring
    all-reduce moves; with W = 3, G = 16 planning makes it 1.33 times as much instead of 1.67.

    Ranks beyond the number of leaves get an empty range.
    """
    return host_major(num_leaves, 1, num_ranks)


@lru_cache(maxsize=256)
def host_major(num_leaves: int, num_hosts: int, num_local: int) -> tuple[range, ...]:
    """As ``rank_major``, where ``num_local`` ranks in a row share a host: few roots have to leave a host.

    The hosts' ranges are cut so first, then those of the ranks of each, none of which gets more than there.
    G = 16 on two hosts of three ranks leaves a root on each, and not three: half of the bytes.
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
    widths = next(
        widths
        for limit in range(1, num_leaves + 1)
        if (widths := _fewest_roots(leaves, busy, load, limit, num_leaves)) is not None
    )
    edges = [leaves.start]
    for width in widths:
        edges.append(edges[-1] + width)
    cuts = [range(lo, hi) for lo, hi in pairwise(edges)]
    return (*cuts, *[range(leaves.stop, leaves.stop)] * (num_ranks - busy))


def _fewest_roots(
    leaves: range, num_ranks: int, load: int, limit: int, num_leaves: int
) -> tuple[int, ...] | None:
    """Widths of contiguous ranges with the fewest roots in total and at most ``limit`` each, or None."""
    # best[hi] = (total roots, negated widths) of the best cut of [start, hi) into the ranks so far.
    best: dict[int, tuple[int, tuple[int, ...]]] = {leaves.start: (0, ())}
    for rank in range(num_ranks):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        ranks_left = num_ranks - rank - 1
        for lo, (total, widths) in best.items():
            for width in range(1, load + 1):
                hi = lo + width
                if not ranks_left <= leaves.stop - hi <= ranks_left * load:
                    continue
                count = _count_roots(lo, hi, num_leaves)
                if count <= limit:
                    found = (total + count, (*widths, -width))
                    longer[hi] = min(longer.get(hi, found), found)
        best = longer
    return tuple(-width for width in best[leaves.stop][1]) if leaves.stop in best else None


@lru_cache(maxsize=65536)
def _count_roots(lo: int, hi: int, num_leaves: int) -> int:
    """Number of maximal nodes inside [lo, hi), by descending from the root."""

    def count(a: int, b: int) -> int:
        if lo <= a and b <= hi:
            return 1
        if b <= lo or hi <= a:
            return 0
        middle = split(a, b)
        return count(a, middle) + count(middle, b)

    return count(0, num_leaves)
