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
the headers. A small bucket travels whole to all ranks instead, in one step. Where ranks
can reach into each other's buckets (backend "shm") nothing is sent: each adds its slices where they lie. How
slices travel is a ``Transport``'s, one class a file: ``shm_transport.py``, ``gloo_transport.py``,
``collective_transport.py``, ``hierarchical_transport.py``.

G: micro-batches in the step. W: ranks. R: roots of all ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.events import Recorder
from instep.mesh.hang_report import Problem
from instep.mesh.host_group import HostGroup
from instep.mesh.process_group import Group, SharedGroup
from instep.ordered.buckets import Bucket, Bundle
from instep.ordered.collective_transport import CollectiveTransport
from instep.ordered.gloo_transport import GlooTransport
from instep.ordered.header import (
    Header,
    disagreement,
    header_length,
    pack,
    unpack,
    whereabouts,
    words_of,
)
from instep.ordered.hierarchical_transport import HierarchicalTransport
from instep.ordered.scratch import Scratch
from instep.ordered.shm_transport import ShmTransport
from instep.ordered.tree import Sum, plan_sum

_weight, _buffers, _fed = attrgetter("weight"), attrgetter("buffers"), attrgetter("fed")


class Transport(Protocol):
    """How the slices of roots come to their owner, and the sums from there to all ranks of a group.

    For each bucket ``meet``, in which ranks find out whether all have come for the same, then ``reduce``.
    """

    scratch: Scratch
    at_once_bytes: int  # a bucket of which all roots together have no more is exchanged in fewer messages

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that it keeps, ``scratch`` too, in storages that are no larger than what is used."""

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        """The ``row`` (length,) int64 of every rank, in the CPU's memory: (W, length).

        In shared memory ranks also show where the roots of ``bucket`` lie, which comes next by ``plan``.
        """

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """The ``home`` of ``bucket`` becomes the sum of all ranks' roots by ``plan``, times ``scale``."""


class OrderedAllReduce:
    """Reduces buckets over ``group``, one after the other, from one thread at a time.

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

    @property
    def scratch(self) -> list[Tensor]:
        """The buffers that it keeps."""
        return self.transport.buffers

    def run(self, bucket: Bucket, header: Header, leaves: Sequence[Sequence[int]]) -> None:
        """Turn the ``counter.roots`` of ``bucket`` into the mean gradient in ``bucket.home``.

        ``leaves[r]`` are the leaves of rank r. The sum over all G leaves is multiplied once by
        1 / (sum of the ranks' weights).

        Raises:
            Desync: the ranks are not in the same exchange; raised on every rank alike.
            PeerLost: a rank did not come.
            ReplicasDiffer: what ``compare`` raises, before a gradient is added; on every rank alike.
            ValueError: the weights of all ranks sum to zero.
        """
        name = f"the exchange of bucket {header.bucket}"
        plan = plan_sum(leaves, header.num_leaves) if self.ordered else None
        begun_ns = time.monotonic_ns()
        try:
            headers = self._agree(bucket, header, name, bucket, plan)
            agreed_ns, scale = time.monotonic_ns(), mean_scale(headers)
            if plan is None:
                self._unordered(bucket, scale, name)
            else:
                self.transport.reduce(bucket, plan, scale, name)
        except PeerLost as lost:
            raise _lost_in(header, lost) from None
        except (InstepError, ValueError):
            raise  # on every rank
        except BaseException:  # on this rank alone, an interrupt for example, perhaps between two messages
            self.group.break_off(name)
            raise
        ended_ns, num_bytes = time.monotonic_ns(), bucket.nodes.wire_bytes
        self._record(headers, begun_ns, agreed_ns, ended_ns, num_bytes)

    def meet(self, bucket: Bundle, header: Header, name: str) -> list[Header]:
        """The headers of all ranks, once all are there, and which of them have gradients, in ``presence``.

        Raises:
            Desync, PeerLost, ReplicasDiffer: as ``run``.
        """
        begun_ns = time.monotonic_ns()
        try:
            headers = self._agree(bucket, header, name)
        except PeerLost as lost:
            raise _lost_in(header, lost) from None
        self._record(headers, begun_ns, time.monotonic_ns())
        return headers

    def come_to(self, header: Header, words: Sequence[int], name: str) -> list[list[int]]:
        """The ``words`` of every rank, at most ``NUM_WORDS``, once all have come to ``header.act``.

        Raises:
            Desync, PeerLost: as ``run``.
        """
        try:
            rows = self.transport.meet(pack(header, 0, 0, self.header_length, words), name)
            headers = unpack(rows, 0)[0]
            if (problem := disagreement(headers, self.group.ranks)) is not None:
                raise self._desync(headers, problem, name)
        except PeerLost as lost:
            raise _lost_in(header, lost) from None
        return words_of(rows, len(words))

    def leave(self, header: Header, name: str) -> None:
        """Tell the others, where they expect a bucket, that this rank sends nothing more in this step."""
        self.transport.meet(pack(header._replace(left=1), 0, 0, self.header_length), name)

    def _record(
        self,
        headers: Sequence[Header],
        begun_ns: int,
        agreed_ns: int,
        ended_ns: int | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Events since ``begun_ns``, when this rank was ready: how long did it wait for the last rank?"""
        offsets_ns, rank = self.offsets_ns, self.group.rank
        mine, last, latest_ns = headers[rank], rank, 0
        for r, header in enumerate(headers):
            launched_ns = header.launched_ns - offsets_ns[r]
            if launched_ns > latest_ns:
                last, latest_ns = r, launched_ns
        until_ns = min(max(begun_ns, latest_ns + offsets_ns[rank]), agreed_ns)
        told = [("queued", min(mine.ready_ns, begun_ns), begun_ns, 0, -1)]
        if last != rank and until_ns > begun_ns:
            told.append(("wait", begun_ns, until_ns, 0, self.group.ranks[last]))
        if agreed_ns > until_ns:
            told.append(("agree", until_ns, agreed_ns, 0, -1))
        if ended_ns is not None:
            told.append(("exchange", agreed_ns, ended_ns, num_bytes, -1))
        self.recorder.put_all(told, lane="communication", bucket=mine.bucket)

    def _agree(
        self, bucket: Bundle, header: Header, name: str, sent: Bucket | None = None, plan: Sum | None = None
    ) -> list[Header]:
        num_flags = 2 * len(bucket.slots)
        row = pack(header, bucket.flags(), num_flags, self.header_length)
        headers, flags = unpack(self.transport.meet(row, name, sent, plan), num_flags)
        if (problem := disagreement(headers, self.group.ranks)) is not None:
            raise self._desync(headers, problem, name)
        bucket.take_flags(flags)
        self.buffers, self.fed = [*map(_buffers, headers)], [*map(_fed, headers)]
        if self.compare is not None and header.bucket == header.round == 0:
            self.compare(headers)
        return headers

    def _desync(self, headers: Sequence[Header], problem: Problem, name: str) -> Exception:
        if any(h.left for h in headers):  # who has left the step does not compare anything any more
            return Desync(str(problem))
        return self.group.out_of_step(problem, name)

    def _unordered(self, bucket: Bucket, scale: float, name: str) -> None:
        """The plain all-reduce, whose order is the backend's; here to be compared with."""
        if not bucket.counter.roots:
            bucket.home.zero_()
        self.group.all_reduce(bucket.home, name)
        if scale != 1.0:
            bucket.home.mul_(scale)


def fastest(group: Group) -> Transport:
    """What is fastest over the backend of ``group``, and over its hosts."""
    if isinstance(group, SharedGroup):
        return ShmTransport(group, Scratch())
    if isinstance(group, HostGroup) and group.near is not None:
        return HierarchicalTransport(group, Scratch())
    return (GlooTransport if group.prefers_messages else CollectiveTransport)(group, Scratch())


def _lost_in(header: Header, lost: PeerLost) -> PeerLost:
    """``lost``, and in which step it came. The group keeps the error, to raise again: it stays as it is."""
    message = f"{whereabouts(header)}: {lost}"
    return PeerLost(message, ranks=lost.ranks, operation=lost.operation)


def mean_scale(headers: Sequence[Header]) -> float:
    """What the sum over all leaves is multiplied by.

    Raises:
        ValueError: the weights of all ranks sum to zero.
    """
    weight = sum(map(_weight, headers))
    if weight == 0:
        raise ValueError("the weights of all micro-batches of the step sum to 0: there is nothing to average")
    return 1.0 / weight
