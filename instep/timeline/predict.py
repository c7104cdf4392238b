"""How much communication a step waits for, predicted: for any buckets, for a run's own. Pure.

What is sent while backward runs is hidden, what is left when backward has ended is *exposed*. A bucket can
leave when its last gradient is there, and buckets travel one after the other:

    backward  |=====|=====|=====|=====|          ready_k: bucket k is whole, on the last rank
    network         |--b0--|--b1--|--b2--|--b3--|       start_k = max(start_(k-1) + cost_(k-1), ready_k)
                                      |<------->| exposed

A bucket of s bytes costs a + b s seconds (``instep.comm.cost.AlphaBeta``, and there the closed form for equal
buckets of an even backward). Two models:

    even_backward    buckets of any sizes, of an even backward
    ExchangeModel    the buckets that one run measured, and what others would have taken

Source of the recursion: S. Shi et al., "MG-WFBP", INFOCOM 2019. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from instep.comm.cost import AlphaBeta, fit
from instep.timeline.bucket_times import BucketRow

MEBIBYTE = 1 << 20
CAPS_MB = (1, 2, 4, 8, 16, 25, 50, 100)  # bucket sizes that are worth a trial
MESSAGES = 3  # of an exchange: a header, slices there, slices back
SHM_LATENCY_S = 1e-4  # two meetings of all ranks
SHM_TO_SOCKETS = 1 / 3  # of the time per bucket that is not for bytes: waking up and Python remain
SHM_BYTES = 2  # moved in memory per byte of a bucket and rank: read and written once
OVERLAPPING = ("overlap", "bucketed")  # strategies that send while backward runs
SAME = 2  # sizes within this factor do not tell latency from bandwidth


@dataclass(frozen=True)
class ExchangeTimes:
    """The exchanges of a step: seconds in all, and those that the step waits for."""

    total_s: float
    exposed_s: float
    num_buckets: int = 0

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s


@dataclass(frozen=True)
class HidingCost:
    """What backward loses per second of exchange that is hidden under it.

    Hiding is not free where no core is idle: what an exchange costs in processor time, backward loses. So a
    second that a change moves from exposed to hidden gains less than a second, by ``share_of``.

    Either the run has ``measured`` it, or it is the processor time of an exchange, ``bytes_s`` and
    ``bucket_s`` for each bucket, as far as no core is idle: ``busy``. By default an exchange is nothing else.
    """

    busy: float = 1.0
    bytes_s: float = math.inf
    bucket_s: float = 0.0
    measured: float | None = None

    def share_of(self, outcome: ExchangeTimes) -> float:
        """Of each second that is hidden."""
        if self.measured is not None:
            return self.measured
        work_s = self.bytes_s + self.bucket_s * outcome.num_buckets
        return self.busy * (min(work_s / outcome.total_s, 1.0) if outcome.total_s else 1.0)

    def cost_s(self, outcome: ExchangeTimes) -> float:
        """Seconds that a step is longer by it."""
        return self.share_of(outcome) * outcome.hidden_s


def fit_buckets(rows: Sequence[BucketRow]) -> AlphaBeta:
    """The alpha-beta model fitted to a run's buckets, none of which took no time.

    A latency is at least what the headers take, which are messages of no bytes. Buckets of about one size
    do not tell the two figures apart: then the headers' time per message is the latency, or half of a flight
    where gradients travel with their header.
    """
    sizes, times_s = [float(row.bytes) for row in rows], [row.flight_ms / 1e3 for row in rows]
    apart = [row.agree_ms for row in rows if row.agree_ms]
    header_s = median(apart) / 1e3 if apart else 0.0
    if max(sizes) >= SAME * min(sizes):
        fitted = fit(sizes, times_s)
        if fitted.latency_s >= header_s:
            return fitted
        latency_s = min(header_s, *times_s)
    else:
        half_s = median(times_s) / 2
        latency_s = min(MESSAGES * header_s, half_s) if apart else half_s
    return AlphaBeta(latency_s, (sum(times_s) - latency_s * len(sizes)) / sum(sizes))


def exposed_s(ready_s: Sequence[float], costs_s: Sequence[float], end_s: float) -> float:
    """How long after ``end_s``, when backward ends, the last of the buckets has been exchanged."""
    free_s = -math.inf
    for ready, cost in zip(ready_s, costs_s, strict=True):
        free_s = max(free_s, ready) + cost
    return max(free_s - end_s, 0.0)


def even_backward(
    sizes: Sequence[int], backward_s: float, cost: AlphaBeta, *, overlaps: bool
) -> ExchangeTimes:
    """Buckets of ``sizes`` in plan order, if backward yields their bytes evenly in ``backward_s``.

    With ``overlaps`` they leave while backward runs, else after it.
    """
    each_s = backward_s / sum(sizes)
    ready_s = [sent * each_s if overlaps else backward_s for sent in accumulate(sizes)]
    costs_s = [cost.time_s(size) for size in sizes]
    return ExchangeTimes(sum(costs_s), exposed_s(ready_s, costs_s, backward_s), len(sizes))


def pack(pieces: Sequence[int], cap: float) -> list[int]:
    """Bucket sizes if ``pieces`` are kept whole and a bucket closes once it has reached ``cap`` bytes."""
    buckets, open_bytes = [], 0
    for piece in pieces:
        open_bytes += piece
        if open_bytes >= cap:
            buckets.append(open_bytes)
            open_bytes = 0
    return [*buckets, open_bytes] if open_bytes else buckets


class ExchangeModel:
    """The exchanges of a run's step, as they were and as they might be.

    What a bucket costs is fitted to the run. How gradients become ready is read off the run's own buckets,
    or, where all of them left after backward, taken to be even over the last backward.
    """

    def __init__(
        self,
        rows: Sequence[BucketRow],
        *,
        strategy: str,
        cap_mb: float,
        backward_s: float,
        pause_s: float = 0.0,
    ) -> None:
        """Of ``rows``, one or more, in plan order; ``backward_s``: the backward of a rank's last micro-batch.

        ``pause_s``: what a bucket takes after its flight.
        """
        self.sizes = [row.bytes for row in rows]
        self.times_s = [row.flight_ms / 1e3 + pause_s for row in rows]
        flown = fit_buckets(rows)
        self.cost = AlphaBeta(flown.latency_s + pause_s, flown.s_per_byte)
        self.bytes = sum(self.sizes)
        self.backward_s = backward_s
        self.overlaps = strategy in OVERLAPPING
        self.by_parameter = strategy in ("naive", "overlap")  # each bucket is one
        self.cap_mb = cap_mb
        self._ready_s = [max(row.ready_ms.values()) / 1e3 for row in rows]
        self.end_s = max(self._ready_s)
        self._curve = self._arrival()

    @property
    def bytes_s(self) -> float:
        """What all bytes take, by the fitted cost."""
        return self.cost.s_per_byte * self.bytes

    @property
    def latencies_s(self) -> float:
        """What all buckets take besides."""
        return self.cost.latency_s * len(self.sizes)

    def now(self) -> ExchangeTimes:
        """As it was."""
        return self._outcome(self._ready_s, self.times_s, self.overlaps)

    def with_cost(self, cost: AlphaBeta) -> ExchangeTimes:
        """The same buckets over another transport."""
        return self._outcome(self._ready_s, [cost.time_s(size) for size in self.sizes], self.overlaps)

    def with_buckets(self, sizes: Sequence[int], overlaps: bool = True) -> ExchangeTimes:
        """Buckets of these sizes, sent while backward runs, or after it."""
        sent, ready_s = 0, []
        for size in sizes:
            sent += size
            ready_s.append(self.ready_s(sent))
        return self._outcome(ready_s, [self.cost.time_s(size) for size in sizes], overlaps)

    def buckets_of(self, cap_mb: float) -> list[int]:
        """The sizes of the buckets with this cap. A bucket that is to be cut is cut evenly."""
        cap = cap_mb * MEBIBYTE
        if self.by_parameter or (cap >= self.cap_mb * MEBIBYTE and len(self.sizes) > 1):
            return pack(self.sizes, cap)
        whole, rest = divmod(self.bytes, int(cap))
        return [int(cap)] * whole + [rest] * (rest > 0)

    def ready_s(self, num_bytes: float) -> float:
        """When the first ``num_bytes`` of the gradients are whole on all ranks."""
        for (before, early_s), (after, late_s) in pairwise(self._curve):
            if num_bytes <= after:
                return early_s + (late_s - early_s) * (num_bytes - before) / (after - before)
        return self.end_s

    def _arrival(self) -> list[tuple[int, float]]:
        """(bytes, when that many are ready): a curve that never falls, from the begin of backward."""
        begin_s = self.end_s - self.backward_s
        if not self.overlaps:
            return [(0, begin_s), (self.bytes, self.end_s)]
        curve, sent = [(0, begin_s)], 0
        for size, ready in zip(self.sizes, self._ready_s, strict=True):
            sent += size
            curve.append((sent, max(ready, curve[-1][1])))
        return curve

    def _outcome(self, ready_s: Sequence[float], costs_s: Sequence[float], overlaps: bool) -> ExchangeTimes:
        ready_s = ready_s if overlaps else [self.end_s] * len(costs_s)
        return ExchangeTimes(sum(costs_s), exposed_s(ready_s, costs_s, self.end_s), len(costs_s))


def saved_s(now: ExchangeTimes, then: ExchangeTimes, hiding: HidingCost) -> float:
    """Seconds that a step gets shorter: fewer exposed, less what backward then loses beyond what it does."""
    return now.exposed_s - then.exposed_s - (hiding.cost_s(then) - hiding.cost_s(now))


def pause_s(rows: Sequence[BucketRow], sync_s: float) -> float:
    """From the end of a flight to the begin of the next, where a step waits ``sync_s`` for all of them.

    Between two buckets a thread wakes up, copies and hands over. What a step waits for beyond the flights are
    the pauses of the exposed buckets; those of the hidden ones are taken to be as long.
    """
    exposed = sum(row.exposed_ms for row in rows) / 1e3
    num_exposed = sum(row.exposed_ms / row.flight_ms for row in rows)
    return max(sync_s - exposed, 0.0) / max(num_exposed, 1.0)


def over_shared_memory(sockets: AlphaBeta, memory_bytes_per_s: float) -> AlphaBeta:
    """What buckets would cost in shared memory; every rank has so much of the memory's rate to itself."""
    return AlphaBeta(max(sockets.latency_s * SHM_TO_SOCKETS, SHM_LATENCY_S), SHM_BYTES / memory_bytes_per_s)


def copying_s(num_bytes: int, num_ranks: int, memory_bytes_per_s: float) -> float:
    """Seconds in which a rank's processor copies and adds for an exchange of ``num_bytes`` over sockets.

    Of the 2 (W - 1)/W S bytes out and as many in, each is read and written on both sides of the socket, and
    W - 1 of W slices are added: 11 (W - 1)/W S bytes through memory.
    """
    return 11 * (num_ranks - 1) / num_ranks * num_bytes / memory_bytes_per_s
