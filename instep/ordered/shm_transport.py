"""Nothing is sent: every rank reads what all ranks have where it lies. Over shm.

A bucket costs two rounds, in which all ranks wait for the last: in the first one each writes down its header,
and where its roots and its home lie; then every rank adds its slice of all roots, and writes the sum into all
homes; the second one says that it has, and is the first one of the next bucket, where one follows. What is
small is written down itself, and added up by all:

    large    | header, places |   each adds its slice, where it lies   | done |
    small    | header, roots  |   each adds everything, into its home
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from instep.mesh.axes import round_up
from instep.mesh.process_group import SharedGroup
from instep.ordered.add_up import add_up
from instep.ordered.buckets import Bucket, TreeAccumulator
from instep.ordered.collective_transport import CollectiveTransport, values_of
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum

# Of all roots of a bucket together. A round costs as much as to add so many bytes.
AT_ONCE_BYTES = 512 << 10
PLACE_WORDS, WORD_BYTES, LINE_BYTES = 4, 8, 64
Reached = tuple[list[list[int]], list[Tensor], list[Tensor]]
"""Places by rank, this rank's slice of every root, and of every home."""


class ShmTransport(CollectiveTransport):
    """A ``Transport`` of buckets in memory that all ranks have mapped; others travel by collectives.

    What the ranks' places are mapped to is kept for as long as the memory of the bucket here.
    """

    group: SharedGroup

    def __init__(self, group: SharedGroup, scratch: Scratch, *, at_once_bytes: int = AT_ONCE_BYTES) -> None:
        super().__init__(group, scratch, at_once_bytes=at_once_bytes)
        self._shown: Tensor | None = None  # what all ranks have written down of the bucket that is next
        self._start = 0  # of that, behind the header, in words
        self._reached: WeakKeyDictionary[TreeAccumulator, Reached] = WeakKeyDictionary()
        # Of the halves, the same ones for good: to cut and view one takes as long as a small bucket.
        self._parts: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        """The ``row`` (length,) of every rank: (W, length). What there is of ``bucket`` is told with it."""
        length, self._shown = row.numel(), None

        def write(half: Tensor) -> None:
            self._part(half, 0, row).copy_(row)
            if bucket is not None and plan is not None:
                self._write(half, length, bucket, plan)

        shown = self.group.publish(write, length, name)
        if bucket is not None and plan is not None:
            self._shown, self._start = shown, length
        kind = shown.data_ptr(), -1, length, torch.int64
        if (headers := self._parts.get(kind)) is None:
            with torch.inference_mode(False):  # it outlives what it is made in
                headers = self._parts[kind] = shown[:, : length * WORD_BYTES].view(torch.int64)
        return headers

    def _write(self, half: Tensor, length: int, bucket: Bucket, plan: Sum) -> None:
        roots = values_of(bucket)
        if self._is_small(bucket, plan):
            start, nbytes = _start_of_data(length), bucket.nbytes
            for root in roots:
                self._part(half, start, root).copy_(root)
                start += nbytes
            return
        words = [word for x in (*roots, bucket.home) for word in self.group.address_of(x)]
        told = torch.tensor([len(words), *words], dtype=torch.int64, device="cpu")
        self._part(half, length * WORD_BYTES, told).copy_(told)

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if self._is_small(bucket, plan):
            self._add_everything(bucket, plan, scale, name)
            return
        reached = self.map_roots(bucket, plan, name)
        if reached is None:
            self._exchange_slices(bucket, plan, scale, name)
            return
        _, values, homes = reached
        add_up(values, plan, scale, homes, bucket.nodes, self._own(bucket).start)
        if not bucket.followed:
            self.group.barrier(name)

    def _is_small(self, bucket: Bucket, plan: Sum) -> bool:
        return sum(plan.counts) * bucket.nbytes <= self.at_once_bytes

    def _take_shown(self, bucket: Bucket, plan: Sum, name: str) -> Tensor:
        """What all have written down of ``bucket`` in ``meet``, or else now."""
        if self._shown is None:
            self.meet(torch.empty(0, dtype=torch.int64, device="cpu"), name, bucket, plan)
        shown, self._shown = self._shown, None
        assert shown is not None
        return shown

    def _own(self, bucket: Bucket) -> slice:
        """This rank's part of the elements of ``bucket``."""
        length = bucket.num_elements // self.group.size
        return slice(self.group.rank * length, (self.group.rank + 1) * length)

    def _add_everything(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        values, kept, home = list[Tensor](), list[int](), bucket.counter.home
        shown = self._take_shown(bucket, plan, name)
        for rank, count in enumerate(plan.counts):
            if rank == self.group.rank:
                values += values_of(bucket)
                continue
            kept += range(len(values), len(values) + count)
            start = rank * shown.stride(0) + _start_of_data(self._start)
            for i in range(count):
                values.append(self._part(shown, start + i * bucket.nbytes, home))
        add_up(values, plan, scale, [home], bucket.nodes, kept=kept)

    def map_roots(self, bucket: Bucket, plan: Sum, name: str) -> Reached | None:
        """What all ranks have of ``bucket``; None, on every rank, if something lies in private memory."""
        places = []
        for words in self._take_shown(bucket, plan, name).view(torch.int64)[:, self._start :]:
            places.append(words[1 : 1 + int(words[0])].tolist())
        known = self._reached.get(bucket.counter)
        if known is not None and known[0] == places:
            return known
        if any(-1 in told[::PLACE_WORDS] for told in places):
            return None
        own = self._own(bucket)
        values, homes = list[Tensor](), list[Tensor]()
        for rank, told in enumerate(places):
            each = [told[i : i + PLACE_WORDS] for i in range(0, len(told), PLACE_WORDS)]
            *its, home = (x[own] for x in self.group.map_peer(rank, each, bucket.dtype, name))
            values += its
            homes.append(home)
        found = self._reached[bucket.counter] = places, values, homes
        return found

    def _part(self, memory: Tensor, start: int, like: Tensor) -> Tensor:
        """As much of ``memory`` from byte ``start`` on as there is in ``like``, in its dtype."""
        kind = memory.data_ptr(), start, like.nbytes, like.dtype
        if (found := self._parts.get(kind)) is None:
            with torch.inference_mode(False):
                whole = memory.as_strided((start + like.nbytes,), (1,))
                found = self._parts[kind] = whole[start:].view(like.dtype)
        return found


@cache
def _start_of_data(length: int) -> int:
    return round_up(length * WORD_BYTES, LINE_BYTES)
