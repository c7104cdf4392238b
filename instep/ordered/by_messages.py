"""Slices travel in messages from rank to rank: over gloo, whose all-to-all uses a link one way at a time.

Own slices are added where they lie; those of the others are received, and the sum is sent back to all. A link
that carries one bucket stands still while its slices are added, and while ranks meet for the next bucket. So
several are under way: what can be sent of a bucket is sent as soon as ranks have met for it, and what has to
be waited for goes on in a thread of its own.

    ranks meet          | 0 | 1 | 2 |     | 3 |
    slices to owners         | 0   | 1   | 2   |     | 3   |
    added                        |0|   |1|   |2|         |3|       in the thread of messages
    means to all                    | 0   | 1   | 2   |     | 3   |

Messages of two buckets never take each other's place: slices have one tag and means another, and of each kind
those of the bucket that comes first are sent first, on every rank. They have connections of their own
(``Group.open_line``): ranks that meet for a bucket do not wait behind the bytes of those before it.

Ranks meet by a message from each to each (``comm.meeting_place``), in which the roots of a small bucket
travel along, and between two ranks those of a larger one, if each has one root: those are as many bytes as
slices:

    | number of words | header | roots of the bucket | number of the meeting |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from instep.comm.meeting_place import LINE_BYTES, WORD_BYTES, MeetingPlace
from instep.comm.messages import Messages
from instep.errors import Desync
from instep.mesh.axes import round_up
from instep.mesh.process_group import Group
from instep.ordered.add_up import add_up_to_send
from instep.ordered.buckets import Bucket
from instep.ordered.by_collectives import ByCollectives
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum

Parts: TypeAlias = Mapping[int, Sequence[Tensor]]
"""By owner, what is sent to it, or comes from it."""

SLICES, MEANS = 1, 2  # tags
CHEAP = 32  # times as large a bucket as a small one: to copy and add more takes as long as a second message
# What is received of a bucket that may travel beside others: a large one keeps a link busy on its own.
BESIDE_BYTES = 8 << 20


class ByMessages(ByCollectives):
    """A ``Transport`` of buckets on the CPU; those on another device travel by the backend's collectives.

    Buckets that are under way have memory of their own for what they receive, ``BESIDE_BYTES`` at most. Where
    ranks meet there is room for 2 W headers, and for as many times the roots that may travel along.
    """

    num_under_way = 3

    def __init__(self, group: Group, scratch: Scratch) -> None:
        super().__init__(group, scratch)
        self._num_begun = 0
        self._place = MeetingPlace.of(group)
        self._rows = torch.empty((group.size, 0), dtype=torch.uint8, device="cpu")  # of the last meeting
        self._num_words: list[int] = []  # that the ranks have met with, by rank
        self._roots_from: int | None = None  # in these, if the roots of the bucket that is next are there
        self.came_along = False  # they were, of the bucket that ranks have met for last

    @property
    def buffers(self) -> list[Tensor]:
        return [*super().buffers, *self._place.buffers]

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        """The ``row`` (length,) of every rank: (W, length). The roots of ``bucket`` come along, if small."""
        if self.group.size == 1:
            return super().meet(row, name)
        # First how many words, so that a row of words begins behind it; what follows begins a line of memory.
        words, roots_from = 1 + len(row), round_up((1 + len(row)) * WORD_BYTES, LINE_BYTES)
        rows = self._place.enter(roots_from + round_up(self._most_bytes, LINE_BYTES) + LINE_BYTES)
        own, self._rows = rows[self.group.rank], rows
        own[WORD_BYTES : words * WORD_BYTES].view(torch.int64).copy_(row)
        self._roots_from, num_words = None, words
        if bucket is not None and plan is not None and self._comes_along(bucket, plan, len(own) - roots_from):
            self._roots_from = roots_from
            roots = [root for _, root in bucket.counter.roots]
            for root, place in zip(roots, self._places(bucket, self.group.rank, len(roots)), strict=True):
                bucket.nodes.encode(root, out=place)
            num_words = self._count(bucket, len(roots))
        self._num_words = self._place.exchange(self.group, num_words, name)
        self.came_along = self._roots_from is not None
        return rows[:, WORD_BYTES : words * WORD_BYTES].view(torch.int64)

    def _comes_along(self, bucket: Bucket, plan: Sum, room: int) -> bool:
        """Whether the roots of ``bucket`` travel whole: if small, or if that takes no more bytes than slices.

        So it is between two ranks with a root each. Buckets that others follow are under way beside these.
        ``room`` is for roots and a number, in bytes.
        """
        if bucket.device.type != "cpu" or max(plan.counts) * bucket.nodes.wire_bytes > room - LINE_BYTES:
            return False
        if self._is_small(bucket, plan):
            return True
        is_cheap = self.group.size == 2 and max(plan.counts) == 1 and not bucket.followed
        return is_cheap and sum(plan.counts) * bucket.nbytes <= self._most_bytes

    @property
    def _most_bytes(self) -> int:
        """Of the roots that a rank sends when ranks meet."""
        return self.at_once_bytes * (CHEAP if self.group.size == 2 else 1)

    def _places(self, bucket: Bucket, rank: int, count: int) -> Sequence[Tensor]:
        """Where the roots of ``rank`` are, ``count`` of them, as they travel."""
        assert self._roots_from is not None
        length = bucket.nodes.wire_bytes
        whole = self._rows[rank, self._roots_from : self._roots_from + count * length]
        roots = whole.view(bucket.nodes.wire_dtype).split(length // bucket.nodes.wire_dtype.itemsize)
        return roots[:count]  # of nothing there is one part

    def _count(self, bucket: Bucket, count: int) -> int:
        """The words up to the end of ``count`` roots of ``bucket`` behind a header."""
        assert self._roots_from is not None
        return (self._roots_from + round_up(count * bucket.nodes.wire_bytes, WORD_BYTES)) // WORD_BYTES

    def _require_alike(self, bucket: Bucket, plan: Sum, name: str) -> None:
        """Raise ``Desync``, on every rank alike, unless all have sent their roots along, or none has."""
        seen = self._num_words
        if not seen:  # they have met elsewhere, if at all
            return
        own, along = seen[self.group.rank], self._roots_from is not None
        expected = [self._count(bucket, count) if along else own for count in plan.counts]
        for rank, found, words in zip(self.group.ranks, seen, expected, strict=True):
            if found != words:
                raise Desync(
                    f"{name}: rank {rank} has sent {found * WORD_BYTES} bytes to meet rank "
                    f"{self.group.global_rank}, which expected {words * WORD_BYTES}: they do not agree on "
                    "whether gradients travel with headers. Run the same version of instep on every rank"
                )

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        self._require_alike(bucket, plan, name)
        if self._roots_from is not None:
            places = [self._places(bucket, rank, count) for rank, count in enumerate(plan.counts)]
            self._roots_from = None
            self._add_received(bucket, plan, scale, places)
            return
        if bucket.device.type != "cpu" or self._is_small(bucket, plan):
            super().reduce(bucket, plan, scale, name)
            return
        # In one piece, because the thread that waits for messages is another one.
        self.group.run(lambda: self._send(bucket, plan, scale, self.scratch)()(), name)

    def begin(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> Callable[[], int] | None:
        """Send the slices of ``bucket``; what is returned waits for the rest, and says when that ended."""
        others = sum(plan.counts) - plan.counts[self.group.rank]
        is_large = others * bucket.nodes.wire_bytes > BESIDE_BYTES * self.group.size
        if bucket.device.type != "cpu" or self._roots_from is not None or is_large:
            # Ranks with other shares may see it otherwise; what is sent, and in which order, is the same.
            return super().begin(bucket, plan, scale, name)
        self._require_alike(bucket, plan, name)
        self._num_begun += 1
        scratch = self.scratch.beside(self._num_begun % self.num_under_way)
        return self.group.begin(lambda: self._send(bucket, plan, scale, scratch), name)

    def _send(
        self, bucket: Bucket, plan: Sum, scale: float, scratch: Scratch
    ) -> Callable[[], Callable[[], None]]:
        """Send the slices. What is returned adds them, once they have come, and returns what ends it."""
        whole = OwnedSlices(bucket, bucket.home, self.group.rank, 0, scratch)
        rounds = whole.rounds([root for _, root in bucket.counter.roots], plan, scale)
        slices = self._post(next(rounds), SLICES)

        def add() -> Callable[[], None]:
            slices()
            means = self._post(next(rounds), MEANS)

            def end() -> None:
                means()
                next(rounds, None)

            return end

        return add

    def _post(self, parts: tuple[Parts, Parts], tag: int) -> Callable[[], None]:
        """Begin to send and to receive; what is returned waits for all of it, or raises why it could not."""
        sent, received = map(_in_turn, parts)
        return Messages(self.group.messages_pg, self.group.ranks, tag=tag).begin_anyway(sent, received)


class OwnedSlices:
    """Elements of ``bucket`` from ``first`` on, in slices of which owner number o owns that number o.

    ``home`` is their place in the bucket's home, and this rank is owner number ``own``.
    """

    def __init__(self, bucket: Bucket, home: Tensor, own: int, first: int, scratch: Scratch) -> None:
        self.bucket, self.home, self.own, self.first, self.scratch = bucket, home, own, first, scratch

    def rounds(self, roots: Sequence[Tensor], plan: Sum, scale: float) -> Iterator[tuple[Parts, Parts]]:
        """``home`` becomes the sum, by ``plan``, of the ``roots`` of all owners, times ``scale``.

        Yields what is to be sent and received next, by owner; when the next one is asked for, it has been.
        """
        nodes, num_owners, length = self.bucket.nodes, len(plan.counts), self.bucket.slice_length
        others = [(self.own + k) % num_owners for k in range(1, num_owners)]
        firsts = [self.first + owner * length for owner in range(num_owners)]
        slices = [root.split(length) for root in roots]
        memory = self.scratch.take(
            (sum(plan.counts) - len(roots)) * nodes.wire_length, nodes.wire_dtype, self.bucket.device
        )
        rows = iter(memory.view(-1, nodes.wire_length))
        came = {source: [next(rows) for _ in range(plan.counts[source])] for source in others}
        yield {to: [nodes.encode(each[to], firsts[to]) for each in slices] for to in others}, came
        terms = {source: [nodes.decode(row, firsts[self.own]) for row in came[source]] for source in others}
        terms[self.own] = [each[self.own] for each in slices]
        values = [term for owner in range(num_owners) for term in terms[owner]]
        gathered = nodes.gathered(self.home, self.scratch)
        means = gathered.split(nodes.wire_length)
        add_up_to_send(values, plan, scale, nodes, firsts[self.own], means[self.own])
        yield {to: [means[self.own]] for to in others}, {source: [means[source]] for source in others}
        nodes.decode_mean(gathered, scale, self.home, self.first)


def _in_turn(parts: Parts) -> list[tuple[Tensor, int]]:
    return [(x, owner) for owner, xs in parts.items() for x in xs]
