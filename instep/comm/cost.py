"""The alpha-beta model: the cost of a message, and of a collective, counted from its steps. Arithmetic only.

In Hockney's model a message of n bytes takes alpha + n beta seconds, and a rank sends one message and
receives one at a time. ``AlphaBeta`` holds the two figures of a link, given or fitted to measured times; the
planner, the advice and the benchmarks use it. ``best_bucket`` is the bucket size that exposes least: S. Shi
et al., "MG-WFBP", INFOCOM 2019. Units: seconds, bytes.

    collective_cost(ring.all_reduce, 4, 1 << 18, itemsize=4).time_s(alpha_s=20e-6, beta_s=1e-9)      # 0.0017
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep.comm.schedule import Piece, Schedule, edges, transfers


@dataclass(frozen=True)
class AlphaBeta:
    """What a message costs: ``latency_s`` + ``s_per_byte`` x bytes (alpha and beta)."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + num_bytes * self.s_per_byte


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """The model with the smallest relative errors (weighted least squares); neither figure is negative.

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


def standard_errors(sizes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """Of the two figures that ``fit`` finds, from the residuals; infinite for two times or fewer."""
    model, num = fit(sizes, times_s), len(sizes)
    if num < 3:
        return AlphaBeta(math.inf, math.inf)
    p, q = [1 / t for t in times_s], [s / t for s, t in zip(sizes, times_s, strict=True)]
    pp, qq, pq = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((p, p), (q, q), (p, q)))
    residuals = (model.time_s(size) / t - 1 for size, t in zip(sizes, times_s, strict=True))
    variance = sum(r * r for r in residuals) / (num - 2) / (pp * qq - pq * pq)
    return AlphaBeta(math.sqrt(variance * qq), math.sqrt(variance * pp))


def uniform_exposed_s(bucket: float, total: float, backward_s: float, link: AlphaBeta) -> float:
    """Communication that the step waits for, with buckets of ``bucket`` of the ``total`` bytes, in seconds.

    Backward takes T_b and yields its S bytes of gradients evenly. They leave in buckets of s bytes:

        comm-bound, b S > T_b: the network never idles after the first bucket, so

            exposed(s) = T_b s/S  +  (S/s) a + b S  -  T_b
                         wait for    all buckets       was hidden
                         the first

        compute-bound: the network keeps up as long as a bucket travels faster than the next one fills,
        a + b s <= T_b s/S; then only the last is exposed: a + b s.

        in general the larger of the two.

    A bucket that is larger than the whole is the whole. What the model leaves out: on one host, communication
    takes processor time and memory bandwidth from backward.
    """
    bucket = min(bucket, total)
    wire_s = total / bucket * link.latency_s + link.s_per_byte * total
    return max(backward_s * bucket / total + wire_s - backward_s, link.time_s(bucket))


def best_bucket(total: float, backward_s: float, link: AlphaBeta, hiding: float = 0.0) -> float:
    """The bucket size in bytes that lengthens a step least; at most ``total``.

    A step gets longer by what is exposed and, where no core is idle, by a share h, ``hiding``, of what is
    hidden (see ``busy_share``). Small buckets pay a latency each, large ones start late. The best size is

        comm-bound       S sqrt(a / ((1 - h) T_b))
        compute-bound    sqrt(h a S / ((1 - h) b)), but at least a S / (T_b - b S), where the network keeps up
    """
    a, b, visible = link.latency_s, link.s_per_byte, max(1 - hiding, 0.0)

    def cost_s(bucket: float) -> float:
        return visible * uniform_exposed_s(bucket, total, backward_s, link) + hiding * a * total / bucket

    spare_s = backward_s - b * total
    sizes = [
        total * math.sqrt(a / (visible * backward_s)) if visible * backward_s else total,
        math.sqrt(hiding * a * total / (visible * b)) if visible * b else total,
        a * total / spare_s if spare_s > 0 else total,
    ]
    return min((min(max(size, 1.0), total) for size in sizes), key=cost_s)


def busy_share(ranks: int, threads: int, cores: int) -> float:
    """Share of the ranks' exchanges that find no idle core while all ranks compute."""
    idle = cores - ranks * threads
    return 1 - min(max(idle / ranks, 0.0), 1.0)


@dataclass(frozen=True)
class CollectiveCost:
    """One collective on W ranks; additions are not counted.

    ``steps`` is the number of messages in the longest chain in which each waits for the one before it, and
    ``path_bytes`` the bytes of the chain with most bytes. ``sent[r]`` are the bytes that rank r sends, in
    ``messages[r]`` messages; empty messages are not sent.
    """

    steps: int
    path_bytes: int
    sent: tuple[int, ...]
    messages: tuple[int, ...]

    def time_s(self, alpha_s: float, beta_s: float) -> float:
        """Seconds at ``alpha_s`` per message and ``beta_s`` per byte; an upper bound where parts differ."""
        return self.steps * alpha_s + self.path_bytes * beta_s


def collective_cost(
    schedule: Schedule, num_ranks: int, num_elements: int, itemsize: int = 1
) -> CollectiveCost:
    """The cost of ``schedule`` on x of ``num_elements``, or on W parts of as many elements together."""

    def num_bytes(piece: Piece) -> int:
        at = edges(num_elements, piece.of)
        return (at[piece.end] - at[piece.first]) * itemsize

    sent, messages = [0] * num_ranks, [0] * num_ranks
    path_bytes = steps = 0.0
    for transfer in transfers(schedule, num_ranks, num_bytes):
        sent[transfer.sender] += num_bytes(transfer.sent)
        messages[transfer.sender] += num_bytes(transfer.sent) > 0
        path_bytes = max(path_bytes, transfer.end)
    for transfer in transfers(schedule, num_ranks, lambda piece: num_bytes(piece) > 0):
        steps = max(steps, transfer.end)
    return CollectiveCost(int(steps), int(path_bytes), tuple(sent), tuple(messages))
