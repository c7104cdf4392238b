"""The ordered all-reduce of one bucket: data movement, then adds in the order of the sum tree.

     rank 0: roots a, b        rank 1: root c                W = 2 slices of every root
    | a0 | a1 |                | c0 | c1 |
    | b0 | b1 |
         \\      all-to-all      /
     rank 0 owns slice 0:  a0 b0 c0        rank 1 owns slice 1:  a1 b1 c1
       ((a0 + b0) + c0) * scale              ((a1 + b1) + c1) * scale       the tree's order, elementwise
         \\      all-gather      /
    | g0 | g1 |  on both

No collective that does arithmetic is used, so neither the backend's algorithm nor the number of ranks
chooses an order. For a bucket of S bytes and r roots per rank, a rank sends (r + 1) S (W-1)/W bytes; with
one root as many as in a ring all-reduce, in two communication steps instead of 2(W-1), after one for the
headers. A small bucket is all-gathered whole, in one step. Over shm nothing is sent: each rank adds its slice
in place. How slices travel is up to the transport: ``transport.py``, ``shm_transport.py``,
``hierarchical_transport.py``.

G: micro-batches in the step. W: ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter

from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.events import Recorder
from instep.net.hang_report import Problem
from instep.net.host_group import HostGroup
from instep.net.process_group import Group, SharedGroup
from instep.reduce.buckets import Bucket, Bundle
from instep.reduce.header import NUM_FIELDS, Header, describe_step, disagreement, header_length, pack, unpack
from instep.reduce.hierarchical_transport import HierarchicalTransport
from instep.reduce.shm_transport import ShmTransport
from instep.reduce.transport import CollectiveTransport, GlooTransport, local_roots
from instep.reduce.tree import Sum

_weight, _buffers, _input_digest = map(attrgetter, ("weight", "buffers", "input_digest"))


class OrderedAllReduce:
    """Reduces buckets over ``group``, one after the other, from one thread at a time.

    Headers go to all its ranks. Data goes to those of the bucket's group, which may be some of them.
    ``transport`` is the fastest one for the group's backend and hosts. Ranks with the same number in
    ``data_ranks`` share their micro-batches.
    """

    def __init__(
        self,
        group: Group,
        recorder: Recorder,
        *,
        ordered: bool,
        max_parameters: int,
        data_ranks: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.recorder = recorder
        self.ordered = ordered
        self.header_length = header_length(max_parameters)
        self.data_ranks = range(group.size) if data_ranks is None else data_ranks
        self.transport = _fastest_transport(group)
        self._transports: dict[Group, CollectiveTransport] = {}  # of other groups
        self.offsets_ns = (0,) * group.size  # of the ranks' clocks to the first rank's
        self.compare: Callable[[Sequence[Header]], None] | None = None  # called before each reduction
        self.buffers: list[int] = []  # by rank, from the headers of the last bucket
        self.input_digests: list[int] = []  # likewise
        self.flights: list[tuple[int, float]] | None = None  # (bytes, seconds) of buckets, where one measures

    @property
    def scratch(self) -> list[Tensor]:
        """The receive buffers."""
        return self.transport.scratch.buffers

    def run(self, bucket: Bucket, header: Header) -> None:
        """Reduce the ``counter.roots`` of ``bucket`` to the mean gradient in ``bucket.home``.

        The sum over all leaves of its group is multiplied once by 1 / (sum of all ranks' weights).

        Raises:
            Desync: the ranks are not in the same exchange; raised on every rank.
            PeerLost: a rank did not arrive.
            ReplicasDiffer: from ``compare``, before a gradient is added; raised on every rank.
            ValueError: the weights of all ranks sum to zero, or differ among ranks that share a micro-batch.
        """
        name = f"the exchange of bucket {header.bucket}"
        plan = bucket.sum if self.ordered else None
        transport = self.transport if bucket.group is self.group else self._transport_of(bucket.group)
        payload = None if plan is None or transport is not self.transport else (bucket, plan)
        started_ns = time.monotonic_ns()
        try:
            headers = self._agree(bucket, header, name, payload)
            agreed_ns, scale = time.monotonic_ns(), mean_scale(headers, self.data_ranks)
            if plan is None:
                _unordered(bucket, scale, name)
            else:
                transport.reduce(bucket, plan, scale, name)
        except PeerLost as lost:
            raise _with_step(header, lost) from None
        except (InstepError, ValueError):
            raise  # on every rank
        except BaseException:  # on this rank alone, an interrupt for example, perhaps between two messages
            for group in {self.group, bucket.group}:
                group.break_off(name)
            raise
        ended_ns = time.monotonic_ns()
        exchanged = "exchange", agreed_ns, ended_ns, bucket.nodes.wire_bytes, -1
        begun_ns = self._record(headers, started_ns, agreed_ns, exchanged)
        if self.flights is not None and bucket.group.size > 1:
            self.flights.append((bucket.home.nbytes, (ended_ns - begun_ns) / 1e9))

    def exchange_headers(self, bucket: Bundle, header: Header, name: str) -> list[Header]:
        """The headers of all ranks; sets ``bucket.presence``.

        Raises:
            Desync, PeerLost, ReplicasDiffer: as ``run``.
        """
        started_ns = time.monotonic_ns()
        try:
            headers = self._agree(bucket, header, name)
        except PeerLost as lost:
            raise _with_step(header, lost) from None
        self._record(headers, started_ns, time.monotonic_ns())
        return headers

    def rendezvous(self, header: Header, words: Sequence[int], name: str) -> list[list[int]]:
        """The ``words`` of every rank, at most ``NUM_WORDS``, once all ranks have reached ``header.op``.

        Raises:
            Desync, PeerLost: as ``run``.
        """
        try:
            rows = self.transport.exchange_headers(pack(header, 0, 0, self.header_length, words), name)
            headers = unpack(rows, 0)[0]
            if (problem := disagreement(headers, self.group.ranks)) is not None:
                raise self._desync(headers, problem, name)
        except PeerLost as lost:
            raise _with_step(header, lost) from None
        found: list[list[int]] = rows[:, NUM_FIELDS : NUM_FIELDS + len(words)].tolist()
        return found

    def announce_leave(self, header: Header, name: str) -> None:
        """Answer the other ranks' next exchange: this rank sends nothing more in this step."""
        self.transport.exchange_headers(pack(header._replace(left=1), 0, 0, self.header_length), name)

    def _record(
        self,
        headers: Sequence[Header],
        started_ns: int,
        agreed_ns: int,
        *exchanged: tuple[str, int, int, int, int],
    ) -> int:
        """Record the events since ``started_ns``: queued, the wait for the last rank, ``exchanged``.

        Returns when the last rank was there.
        """
        offsets_ns, rank = self.offsets_ns, self.group.rank
        mine, last, latest_ns = headers[rank], rank, 0
        for r, header in enumerate(headers):
            launched_ns = header.launched_ns - offsets_ns[r]
            if launched_ns > latest_ns:
                last, latest_ns = r, launched_ns
        until_ns = min(max(started_ns, latest_ns + offsets_ns[rank]), agreed_ns)
        events = [("queued", min(mine.ready_ns, started_ns), started_ns, 0, -1)]
        if last != rank and until_ns > started_ns:
            events.append(("wait", started_ns, until_ns, 0, self.group.ranks[last]))
        if agreed_ns > until_ns:
            events.append(("agree", until_ns, agreed_ns, 0, -1))
        self.recorder.put_all([*events, *exchanged], lane="communication", bucket=mine.bucket)
        return until_ns

    def _agree(
        self, bucket: Bundle, header: Header, name: str, payload: tuple[Bucket, Sum] | None = None
    ) -> list[Header]:
        num_flags = 2 * len(bucket.slots)
        row = pack(header, bucket.flags(), num_flags, self.header_length)
        headers, flags = unpack(self.transport.exchange_headers(row, name, payload), num_flags)
        if (problem := disagreement(headers, self.group.ranks)) is not None:
            raise self._desync(headers, problem, name)
        bucket.set_flags(flags)
        self.buffers = [*map(_buffers, headers)]
        self.input_digests = [*map(_input_digest, headers)]
        if self.compare is not None and header.bucket == header.round == 0:
            self.compare(headers)
        return headers

    def _desync(self, headers: Sequence[Header], problem: Problem, name: str) -> Exception:
        if any(h.left for h in headers):  # a rank that left no longer answers with its place in the program
            return Desync(str(problem))
        return self.group.out_of_step(problem, name)

    def _transport_of(self, group: Group) -> CollectiveTransport:
        if group not in self._transports:
            self._transports[group] = _fastest_transport(group)
        return self._transports[group]


def _unordered(bucket: Bucket, scale: float, name: str) -> None:
    """The plain all-reduce, in the backend's order, for comparison."""
    home, roots = bucket.home, local_roots(bucket)
    if not roots:
        home.zero_()
    for other in roots[1:]:
        home.add_(other)
    bucket.group.all_reduce(home, name)
    if scale != 1.0:
        home.mul_(scale)


def _fastest_transport(group: Group) -> CollectiveTransport:
    if isinstance(group, SharedGroup):
        return ShmTransport(group)
    if isinstance(group, HostGroup) and group.near is not None:
        return HierarchicalTransport(group)
    return (GlooTransport if group.prefers_messages else CollectiveTransport)(group)


def _with_step(header: Header, lost: PeerLost) -> PeerLost:
    """A copy of ``lost`` that names the step; the group raises the original again."""
    message = f"{describe_step(header)}: {lost}"
    return PeerLost(message, ranks=lost.ranks, operation=lost.operation)


def mean_scale(headers: Sequence[Header], data_ranks: Sequence[int]) -> float:
    """1 / (sum of the weights), where ranks with the same number in ``data_ranks`` have the same ones.

    Raises:
        ValueError: the weights sum to zero, or those of one micro-batch differ.
    """
    weights = {*zip(data_ranks, map(_weight, headers), strict=True)}
    if len(weights) > len({*data_ranks}):
        found = [*map(_weight, headers)]
        raise ValueError(
            f"ranks that share micro-batches give them other weights: {found} by rank, data ranks "
            f"{[*data_ranks]}: count all items of the micro-batch on each"
        )
    weight = sum(map(itemgetter(1), weights))
    if weight == 0:
        raise ValueError("the weights of all micro-batches of the step sum to 0: there is nothing to average")
    return 1.0 / weight
