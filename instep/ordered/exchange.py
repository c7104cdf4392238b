"""The ordered all-reduce of one bucket: data movement, then adds in the order of the sum tree.

     rank 0: roots a, b        rank 1: root c                W = 2 slices of every root
    | a0 | a1 |                | c0 | c1 |
    | b0 | b1 |
         \\      all-to-all      /
     rank 0 owns slice 0:  a0 b0 c0        rank 1 owns slice 1:  a1 b1 c1
       ((a0 + b0) + c0) * scale              ((a1 + b1) + c1) * scale       the tree's order, elementwise
         \\      all-gather      /
    | g0 | g1 |  on both

No collective that does arithmetic takes part, so neither the backend's algorithm nor the number of ranks
can choose an order. Bytes that a rank sends for a bucket of S bytes and r roots: (r + 1) S (W-1)/W; with
one root as many as a ring all-reduce. Two communication steps instead of 2(W-1), and one before them for
the headers. A small bucket travels whole to all ranks instead, with the headers where it can. Where ranks
can reach into each other's buckets (backend "shm") nothing is sent: each adds its slices where they lie. How
slices travel is a ``Transport``'s, one class a file: ``by_sharing.py``, ``by_messages.py``,
``by_collectives.py``, ``by_hosts.py``.

G: micro-batches in the step. W: ranks. R: roots of all ranks together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.events import Recorder
from instep.mesh.host_group import HostGroup
from instep.mesh.process_group import Group
from instep.ordered.buckets import Bucket, Bundle
from instep.ordered.by_collectives import ByCollectives
from instep.ordered.by_hosts import ByHosts
from instep.ordered.by_messages import ByMessages
from instep.ordered.by_sharing import BySharing
from instep.ordered.header import (
    Header,
    disagreement,
    header_length,
    pack,
    unpack,
    whereabouts,
    words_of,
)
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum, plan_sum


class Transport(Protocol):
    """How the slices of roots come to their owner, and the sums from there to all ranks of a group.

    For each bucket ``meet``, in which ranks find out whether all have come for the same, then ``reduce``.
    """

    scratch: Scratch
    at_once_bytes: int  # a bucket of which all roots together have no more is exchanged in fewer messages
    num_under_way: int  # buckets that may have begun, at most, and not ended
    came_along: bool  # the roots of the bucket that ranks have met for last travelled with that

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that it keeps, ``scratch`` too, in storages that are no larger than what is used."""

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        """The ``row`` (length,) int64 of every rank, in the CPU's memory: (W, length).

        With the ``bucket`` that comes next, and its ``plan``, its roots may begin to travel along.
        """

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """The ``home`` of ``bucket`` becomes the sum of all ranks' roots by ``plan``, times ``scale``."""

    def begin(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> Callable[[], int] | None:
        """As ``reduce``, but what takes time may go on: then what is returned waits for it.

        It says when that has ended, by ``time.monotonic_ns()``. Meanwhile other buckets may be reduced, and
        their ranks may meet; all are waited for in the order in which they were begun.
        """


class _UnderWay(NamedTuple):
    """The exchange of one bucket, which may have ended."""

    header: Header
    headers: Sequence[Header]  # of all ranks
    num_bytes: int
    begun_ns: int  # then this rank came to meet the others
    agreed_ns: int
    ended_ns: int
    wait: Callable[[], int] | None  # for the end


class OrderedAllReduce:
    """Reduces buckets over ``group``, one after the other, from one thread at a time.

    Some ``Transport``s keep several under way; they are told of as if each had begun when the one before had
    ended, which is how long a link takes for each.

    ``transport`` is by default what is fastest over the group's backend.
    """

    def __init__(
        self,
        group: Group,
        recorder: Recorder,
        *,
        ordered: bool,
        max_parameters: int,
        transport: Transport | None = None,
    ) -> None:
        self.group = group
        self.recorder = recorder
        self.ordered = ordered
        self.header_length = header_length(max_parameters)
        self.transport = transport or fastest(group)
        self.offsets_ns = (0,) * group.size  # of the ranks' clocks to that of the first
        self.compare: Callable[[Sequence[Header]], None] | None = None  # is shown the headers of a reduction
        self.buffers: list[int] = []  # what the ranks said of theirs, with the last bucket
        self.fed: list[int] = []  # and of what their micro-batches were given
        self._under_way: deque[_UnderWay] = deque()
        self._free_ns = 0  # since then no bucket that was begun before is under way

    @property
    def scratch(self) -> list[Tensor]:
        """The buffers that it keeps."""
        return self.transport.buffers

    def run(
        self, bucket: Bucket, header: Header, leaves: Sequence[Sequence[int]], *, more: bool = False
    ) -> None:
        """Turn the ``counter.roots`` of ``bucket`` into the mean gradient in ``bucket.home``.

        ``leaves[r]`` are the leaves of rank r. The sum over all G leaves is multiplied once by
        1 / (sum of the ranks' weights). If ``more`` buckets follow, this one may be under way on return;
        without, all have ended.

        Raises:
            Desync: the ranks are not in the same exchange; raised on every rank alike.
            PeerLost: a rank did not come.
            ReplicasDiffer: what ``compare`` raises, before a gradient is added; on every rank alike.
            ValueError: the weights of all ranks sum to zero.
        """
        name = f"the exchange of bucket {header.bucket}"
        plan = plan_sum(leaves, header.num_leaves) if self.ordered else None
        with self._told_where(header):
            begun_ns = time.monotonic_ns()
            headers = self._agree(bucket, header, name, bucket, plan)
            agreed_ns, scale, wait = time.monotonic_ns(), mean_scale(headers), None
            if self.transport.came_along:  # which is what took the time
                agreed_ns = self._all_there_ns(headers, begun_ns, agreed_ns)[0]
            self._end(self.transport.num_under_way - 1)
            if plan is None:
                self._unordered(bucket, scale, name)
            elif more or self._under_way:
                wait = self.transport.begin(bucket, plan, scale, name)
            else:
                self.transport.reduce(bucket, plan, scale, name)
            ended_ns, num_bytes = time.monotonic_ns(), bucket.nodes.wire_bytes
            now = _UnderWay(header, headers, num_bytes, begun_ns, agreed_ns, ended_ns, wait)
            self._under_way.append(now)
            if not more or (wait is None and len(self._under_way) == 1):
                self._end()

    def _end(self, most: int = 0) -> None:
        """Wait until ``most`` buckets are under way, and record those that have ended."""
        while len(self._under_way) > most:
            first = self._under_way[0]
            ended_ns = first.ended_ns if first.wait is None else first.wait()
            self._under_way.popleft()
            self._record(first.headers, first.begun_ns, first.agreed_ns)
            start_ns = max(first.agreed_ns, self._free_ns)
            self._free_ns = max(start_ns, ended_ns)
            self.recorder.put(
                "exchange",
                start_ns,
                self._free_ns,
                lane="communication",
                num_bytes=first.num_bytes,
                bucket=first.header.bucket,
            )

    @contextmanager
    def _told_where(self, header: Header) -> Iterator[None]:
        """What is under way ends before an error is raised that all ranks raise; a lost rank ends it too."""
        try:
            try:
                yield
            except PeerLost:
                raise
            except Exception:
                self._end()
                raise
        except PeerLost as lost:
            self._under_way.clear()
            raise _lost_in(header, lost) from None

    def meet(self, bucket: Bundle, header: Header, name: str) -> list[Header]:
        """The headers of all ranks, once all are there, and which of them have gradients, in ``presence``.

        Raises:
            Desync, PeerLost, ReplicasDiffer: as ``run``.
        """
        with self._told_where(header):
            begun_ns = time.monotonic_ns()
            headers = self._agree(bucket, header, name)
            self._record(headers, begun_ns, time.monotonic_ns())
            return headers

    def come_to(self, header: Header, words: Sequence[int], name: str) -> list[list[int]]:
        """The ``words`` of every rank, at most ``NUM_WORDS``, once all have come to ``header.act``.

        Raises:
            Desync, PeerLost: as ``run``.
        """
        with self._told_where(header):
            rows = self.transport.meet(pack(header, 0, 0, self.header_length, words), name)
            self._require_agreement(unpack(rows, 0)[0], name)
        return words_of(rows, len(words))

    def leave(self, header: Header, name: str) -> None:
        """Tell the others, where they expect a bucket, that this rank sends nothing more in this step."""
        self._end()
        self.transport.meet(pack(header._replace(left=1), 0, 0, self.header_length), name)

    def _record(self, headers: Sequence[Header], begun_ns: int, agreed_ns: int) -> None:
        """Since ``begun_ns`` this rank was in ``_agree``; until when was that for want of the last rank?

        While the bucket before was under way, it is as if this one had not begun.
        """
        begun_ns, agreed_ns = max(begun_ns, self._free_ns), max(agreed_ns, self._free_ns)
        mine = headers[self.group.rank]
        until_ns, last = self._all_there_ns(headers, begun_ns, agreed_ns)
        told = [("queued", min(mine.ready_ns, begun_ns), begun_ns, -1)]
        if last != self.group.rank and until_ns > begun_ns:
            told.append(("wait", begun_ns, until_ns, self.group.ranks[last]))
        if agreed_ns > until_ns:
            told.append(("agree", until_ns, agreed_ns, -1))
        self.recorder.put_all(told, lane="communication", bucket=mine.bucket)

    def _all_there_ns(self, headers: Sequence[Header], begun_ns: int, agreed_ns: int) -> tuple[int, int]:
        """When the last rank came, between ``begun_ns`` and ``agreed_ns``; and which one that is."""
        ahead_ns = self.offsets_ns[self.group.rank]
        launched = [
            h.launched_ns - offset + ahead_ns for h, offset in zip(headers, self.offsets_ns, strict=True)
        ]
        last = max(range(self.group.size), key=launched.__getitem__)
        return min(max(begun_ns, launched[last]), agreed_ns), last

    def _agree(
        self, bucket: Bundle, header: Header, name: str, sent: Bucket | None = None, plan: Sum | None = None
    ) -> list[Header]:
        num_flags = 2 * len(bucket.slots)
        row = pack(header, bucket.flags(), num_flags, self.header_length)
        headers, flags = unpack(self.transport.meet(row, name, sent, plan), num_flags)
        self._require_agreement(headers, name)
        bucket.take_flags(flags)
        self.buffers = [header.buffers for header in headers]
        self.fed = [header.fed for header in headers]
        if self.compare is not None and header.bucket == header.round == 0:
            self.compare(headers)
        return headers

    def _require_agreement(self, headers: Sequence[Header], name: str) -> None:
        problem = disagreement(headers, self.group.ranks)
        if problem is None:
            return
        if any(h.left for h in headers):  # who has left the step does not compare anything any more
            raise Desync(str(problem))
        raise self.group.out_of_step(problem, name)

    def _unordered(self, bucket: Bucket, scale: float, name: str) -> None:
        """The plain all-reduce, whose order is the backend's; here to be compared with."""
        if not bucket.counter.roots:
            bucket.home.zero_()
        self.group.all_reduce(bucket.home, name)
        if scale != 1.0:
            bucket.home.mul_(scale)


def fastest(group: Group) -> Transport:
    """What is fastest over the backend of ``group``, and over its hosts."""
    if group.backend == "shm":
        return BySharing(group, Scratch())
    if isinstance(group, HostGroup) and group.near is not None:
        return ByHosts(group, Scratch())
    return (ByMessages if group.sends_best else ByCollectives)(group, Scratch())


def _lost_in(header: Header, lost: PeerLost) -> PeerLost:
    """``lost``, and in which step it came. The group keeps the error, to raise again: it stays as it is."""
    message = f"{whereabouts(header)}: {lost}"
    return PeerLost(message, ranks=lost.ranks, operation=lost.operation)


def mean_scale(headers: Sequence[Header]) -> float:
    """What the sum over all leaves is multiplied by.

    Raises:
        ValueError: the weights of all ranks sum to zero.
    """
    weight = sum(h.weight for h in headers)
    if weight == 0:
        raise ValueError("the weights of all micro-batches of the step sum to 0: there is nothing to average")
    return 1.0 / weight
