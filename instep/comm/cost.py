"""The alpha-beta model: what messages cost, what each collective sends, and how long that takes. Arithmetic
only.

The model is Hockney's: a message of n bytes takes alpha + n beta seconds, and a rank sends one message and
receives one at a time. ``AlphaBeta`` holds the two figures of a link, given or fitted to measured times; the
planner of buckets, the advice and the benchmarks all use it.

For a collective, S counts the bytes of x in a broadcast, reduce and all-reduce, and of all W parts together
in the others. Additions are not counted. Rank 0 is the root.

    all_reduce("ring", 4, 1 << 20).time_s(alpha_s=20e-6, beta_s=1e-9)      # 0.0017
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from instep.comm.binomial_tree import children, depth, subtree
from instep.comm.messages import edges, lengths


@dataclass(frozen=True)
class AlphaBeta:
    """What a message costs: ``latency_s`` + ``s_per_byte`` x bytes (alpha and beta)."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: float, num_messages: int = 1) -> float:
        """Seconds for ``num_messages``, one after the other, that have ``num_bytes`` together."""
        return num_messages * self.latency_s + num_bytes * self.s_per_byte


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """The model whose relative errors are least, in the sense of least squares; neither figure is negative.

    Relative, because sizes span decades: otherwise the largest alone would decide, and the latency would be
    whatever is left.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s):
        raise ValueError(f"expected times of two sizes or more, got {len(set(sizes))} sizes")
    # Minimise sum((a/t + b s/t - 1)^2): two linear equations in a and b.
    p, q = [1 / t for t in times_s], [s / t for s, t in zip(sizes, times_s, strict=True)]
    pp, qq = sum(x * x for x in p), sum(x * x for x in q)
    pq = sum(x * y for x, y in zip(p, q, strict=True))
    determinant = pp * qq - pq * pq
    a = (sum(p) * qq - sum(q) * pq) / determinant
    b = (sum(q) * pp - sum(p) * pq) / determinant
    if a < 0:
        return AlphaBeta(0.0, sum(q) / qq)
    return AlphaBeta(sum(p) / pp, 0.0) if b < 0 else AlphaBeta(a, b)


@dataclass(frozen=True)
class CollectiveCost:
    """One collective on W ranks.

    ``steps`` and ``path_bytes`` are the messages, and their bytes, of the longest chain in which each has
    to wait for the one before it. ``sent[r]`` are the bytes that rank r sends, in ``messages[r]`` messages;
    messages of no bytes are not sent.
    """

    steps: int
    path_bytes: int
    sent: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def bytes_sent(self) -> int:
        """By the rank that sends most."""
        return max(self.sent)

    @property
    def num_messages(self) -> int:
        """Of the rank that sends most messages."""
        return max(self.messages)

    def time_s(self, alpha_s: float, beta_s: float) -> float:
        """Seconds, with ``alpha_s`` a message and ``beta_s`` a byte."""
        return AlphaBeta(alpha_s, beta_s).time_s(self.path_bytes, self.steps)

    def __add__(self, then: CollectiveCost) -> CollectiveCost:
        """This, then that."""
        return CollectiveCost(
            self.steps + then.steps,
            self.path_bytes + then.path_bytes,
            tuple(a + b for a, b in zip(self.sent, then.sent, strict=True)),
            tuple(a + b for a, b in zip(self.messages, then.messages, strict=True)),
        )


Formula = Callable[
    [int, int, int], CollectiveCost
]  # of W, S and the bytes of one element, which is never cut


def broadcast(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """x of S bytes from one rank to all."""
    return _cost(BROADCAST, algorithm, W, S, itemsize)


def reduce(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """The sum of W times S bytes, on one rank."""
    return _cost(REDUCE, algorithm, W, S, itemsize)


def all_reduce(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """The sum of W times S bytes, on all ranks."""
    return _cost(ALL_REDUCE, algorithm, W, S, itemsize)


def reduce_scatter(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """The sum of W times S bytes, a part of it on each rank."""
    return _cost(REDUCE_SCATTER, algorithm, W, S, itemsize)


def all_gather(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """S bytes, a part of which is on each rank, on all of them."""
    return _cost(ALL_GATHER, algorithm, W, S, itemsize)


def all_to_all(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """S bytes on each rank, a part for each rank."""
    return _cost(ALL_TO_ALL, algorithm, W, S, itemsize)


def scatter(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """S bytes on one rank, a part for each rank."""
    return _cost(SCATTER, algorithm, W, S, itemsize)


def gather(algorithm: str, W: int, S: int, itemsize: int = 1) -> CollectiveCost:
    """S bytes, a part of which is on each rank, on one of them."""
    return _cost(GATHER, algorithm, W, S, itemsize)


def _cost(formulas: Mapping[str, Formula], algorithm: str, W: int, S: int, itemsize: int) -> CollectiveCost:
    if algorithm not in formulas:
        raise ValueError(f"expected an algorithm of {', '.join(formulas)}, got {algorithm!r}")
    if S % itemsize:
        raise ValueError(f"expected whole elements, got {S} bytes of {itemsize} bytes each")
    return formulas[algorithm](W, S, itemsize)


def _of(steps: int, path_bytes: int, sizes: Sequence[Sequence[int]]) -> CollectiveCost:
    """From the sizes of the messages of each rank."""
    sent = tuple(map(sum, sizes))
    messages = tuple(sum(size > 0 for size in own) for own in sizes)
    return (
        CollectiveCost(steps, path_bytes, sent, messages)
        if any(sent)
        else CollectiveCost(0, 0, sent, messages)
    )


def _parts(W: int, S: int, itemsize: int) -> list[int]:
    return [length * itemsize for length in lengths(S // itemsize, W)]


def _naive_broadcast(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _of(W - 1, (W - 1) * S, [[S] * (W - 1)] + [[]] * (W - 1))


def _naive_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _of(W - 1, (W - 1) * S, [[]] + [[S]] * (W - 1))


def _naive_all_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _naive_reduce(W, S, itemsize) + _naive_broadcast(W, S, itemsize)


def _naive_scatter(W: int, S: int, itemsize: int) -> CollectiveCost:
    own, *others = _parts(W, S, itemsize)
    return _of(W - 1, S - own, [others] + [[]] * (W - 1))


def _naive_gather(W: int, S: int, itemsize: int) -> CollectiveCost:
    own, *others = _parts(W, S, itemsize)
    return _of(W - 1, S - own, [[]] + [[part] for part in others])


def _tree_broadcast(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _of(depth(W), depth(W) * S, [[S] * len(children(v, W)) for v in range(W)])


def _tree_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _of(depth(W), depth(W) * S, [[S] if v else [] for v in range(W)])


def _tree_all_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _tree_reduce(W, S, itemsize) + _tree_broadcast(W, S, itemsize)


def _scatter_allgather(W: int, S: int, itemsize: int) -> CollectiveCost:
    """Down the tree each node receives the parts of its subtree, those of one height at the same time."""
    parts = _parts(W, S, itemsize)
    below = [sum(parts[i] for i in subtree(v, W)) for v in range(W)]
    path_bytes = sum(max(below[1 << k :: 2 << k]) for k in range(depth(W)))
    given = [[below[child] for child in children(v, W)] for v in range(W)]
    return _of(depth(W), path_bytes, given) + _ring_all_gather(W, S, itemsize)


def _all_to_all(W: int, S: int, itemsize: int) -> CollectiveCost:
    parts = _parts(W, S, itemsize)
    return _of(W - 1, (W - 1) * max(parts), [parts[:r] + parts[r + 1 :] for r in range(W)])


def _ring_all_gather(W: int, S: int, itemsize: int) -> CollectiveCost:
    """A rank passes on all parts but that of its right neighbour."""
    parts = _parts(W, S, itemsize)
    passed = [[part for j, part in enumerate(parts) if j != (r + 1) % W] for r in range(W)]
    return _of(W - 1, (W - 1) * max(parts), passed)


def _direct_all_gather(W: int, S: int, itemsize: int) -> CollectiveCost:
    parts = _parts(W, S, itemsize)
    return _of(W - 1, (W - 1) * max(parts), [[part] * (W - 1) for part in parts])


def _ring_all_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _all_to_all(W, S, itemsize) + _ring_all_gather(W, S, itemsize)


def _direct_all_reduce(W: int, S: int, itemsize: int) -> CollectiveCost:
    return _all_to_all(W, S, itemsize) + _direct_all_gather(W, S, itemsize)


def _recursive_doubling(W: int, S: int, itemsize: int) -> CollectiveCost:
    levels = W.bit_length() - 1
    return _folded(W, S, levels, levels * S, [[S] * levels] * (1 << levels))


def _halving_doubling(W: int, S: int, itemsize: int) -> CollectiveCost:
    levels = W.bit_length() - 1
    at = edges(S // itemsize, 1 << levels)

    def block(index: int, k: int) -> int:
        """Bytes of the ``index``-th of the blocks that are 2^k chunks long."""
        return (at[(index + 1) << k] - at[index << k]) * itemsize

    sizes = []
    for node in range(1 << levels):
        own = sum((node >> k & 1) << (levels - 1 - k) for k in range(levels))  # the chunk: its bits reversed
        given = [block(own >> k ^ 1, k) for k in range(levels)]
        kept = [block(own >> k, k) for k in range(levels)]
        sizes.append(given + kept)
    path_bytes = 2 * sum(max(block(i, k) for i in range(1 << levels - k)) for k in range(levels))
    return _folded(W, S, 2 * levels, path_bytes, sizes)


def _folded(W: int, S: int, steps: int, path_bytes: int, sizes: Sequence[Sequence[int]]) -> CollectiveCost:
    """An all-reduce over P nodes, the largest power of two, with W - P ranks folded into their neighbours."""
    folded = W - len(sizes)
    pairs = [side for own in sizes[:folded] for side in ([*own, S], [S])]
    extra = 2 if folded else 0
    return _of(steps + extra, path_bytes + extra * S, [*pairs, *sizes[folded:]])


BROADCAST: dict[str, Formula] = {
    "naive": _naive_broadcast,
    "tree": _tree_broadcast,
    "scatter_allgather": _scatter_allgather,
}
REDUCE: dict[str, Formula] = {"naive": _naive_reduce, "tree": _tree_reduce}
ALL_REDUCE: dict[str, Formula] = {
    "naive": _naive_all_reduce,
    "reduce_broadcast": _tree_all_reduce,
    "ring": _ring_all_reduce,
    "direct": _direct_all_reduce,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
}
REDUCE_SCATTER: dict[str, Formula] = {"ring": _all_to_all, "direct": _all_to_all}
ALL_GATHER: dict[str, Formula] = {"ring": _ring_all_gather, "direct": _direct_all_gather}
ALL_TO_ALL: dict[str, Formula] = {"direct": _all_to_all}
SCATTER: dict[str, Formula] = {"naive": _naive_scatter}
GATHER: dict[str, Formula] = {"naive": _naive_gather}

FORMULAS = {
    "broadcast": BROADCAST,
    "reduce": REDUCE,
    "all_reduce": ALL_REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "all_gather": ALL_GATHER,
    "all_to_all": ALL_TO_ALL,
    "scatter": SCATTER,
    "gather": GATHER,
}
