"""Over shm nothing is sent: every rank reads the other ranks' roots in place.

A bucket costs two barriers. Before the first one each rank publishes its header and the addresses of its
roots and home. Then each rank adds its slice of all roots and writes the sum into all homes. The second
barrier ends the reduction; it is the first one of the next bucket, if one follows. For a small bucket ranks
publish the roots themselves, and every rank adds everything:

    large    | header, addresses |   each rank adds its slice, in place   | done |
    small    | header, roots     |   each rank adds everything, into its home
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from instep.mesh.axes import round_up
from instep.net.process_group import SharedGroup
from instep.reduce.buckets import Bucket, TreeAccumulator
from instep.reduce.transport import CollectiveTransport, Payload, add_up, local_roots
from instep.reduce.tree import Sum

ADDRESS_WORDS, WORD_BYTES, LINE_BYTES = 4, 8, 64
Mapped = tuple[list[list[int]], list[Tensor], list[Tensor]]
"""Addresses by rank, and this rank's slice of every root and of every home."""


class ShmTransport(CollectiveTransport):
    """Exchanges buckets that all ranks have mapped, buckets in private memory by collectives.

    The mappings of a bucket are cached for as long as its memory lives.
    """

    group: SharedGroup
    at_once_bytes = 512 << 10  # a barrier costs as much as adding these

    def __init__(self, group: SharedGroup) -> None:
        super().__init__(group)
        self._published: Tensor | None = None  # by all ranks, of the next bucket
        self._start = 0  # of the payload in it, behind the header, in words
        self._mapped: WeakKeyDictionary[TreeAccumulator, Mapped] = WeakKeyDictionary()
        # Views of the published memory: to make one takes as long as a small bucket.
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def exchange_headers(self, row: Tensor, name: str, payload: Payload | None = None) -> Tensor:
        length, self._published = row.numel(), None

        def write(half: Tensor) -> None:
            self._view(half, 0, row).copy_(row)
            if payload is None:
                return
            bucket, plan = payload
            roots = local_roots(bucket)
            if self._is_small(bucket, plan):
                start, nbytes = _data_start(length), bucket.nbytes
                for root in roots:
                    self._view(half, start, root).copy_(root)
                    start += nbytes
            else:
                words = [word for x in (*roots, bucket.home) for word in self.group.address_of(x)]
                addresses = torch.tensor([len(words), *words], dtype=torch.int64, device="cpu")
                self._view(half, length * WORD_BYTES, addresses).copy_(addresses)

        published = self.group.publish(write, length, name)
        if payload is not None:
            self._published, self._start = published, length
        key = published.data_ptr(), -1, length, torch.int64
        if (headers := self._views.get(key)) is None:
            with torch.inference_mode(False):  # the view outlives this step
                headers = self._views[key] = published[:, : length * WORD_BYTES].view(torch.int64)
        return headers

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if self._is_small(bucket, plan):
            self._add_everything(bucket, plan, scale, name)
            return
        mapped = self.map_slices(bucket, plan, name)
        if mapped is None:
            self._exchange_slices(bucket, plan, scale, name)
            return
        _, values, homes = mapped
        add_up(values, plan, scale, homes, bucket.nodes, self._own_slice(bucket).start)
        if not bucket.followed:
            self.group.barrier(name)

    def _is_small(self, bucket: Bucket, plan: Sum) -> bool:
        return sum(plan.counts) * bucket.nbytes <= self.at_once_bytes

    def _take_published(self, bucket: Bucket, plan: Sum, name: str) -> Tensor:
        """The payloads of all ranks, published with the headers or, without headers, now."""
        if self._published is None:
            self.exchange_headers(torch.empty(0, dtype=torch.int64, device="cpu"), name, (bucket, plan))
        published, self._published = self._published, None
        assert published is not None
        return published

    def _own_slice(self, bucket: Bucket) -> slice:
        length = bucket.num_elements // self.group.size
        return slice(self.group.rank * length, (self.group.rank + 1) * length)

    def _add_everything(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        values, read_only, home = list[Tensor](), list[int](), bucket.counter.home
        published = self._take_published(bucket, plan, name)
        for rank, count in enumerate(plan.counts):
            if rank == self.group.rank:
                values += local_roots(bucket)
                continue
            read_only += range(len(values), len(values) + count)
            start = rank * published.stride(0) + _data_start(self._start)
            for i in range(count):
                values.append(self._view(published, start + i * bucket.nbytes, home))
        add_up(values, plan, scale, [home], bucket.nodes, read_only=read_only)

    def map_slices(self, bucket: Bucket, plan: Sum, name: str) -> Mapped | None:
        """Map this rank's slice of all roots and homes; None, on every rank, if any is private memory."""
        addresses = []
        for words in self._take_published(bucket, plan, name).view(torch.int64)[:, self._start :]:
            addresses.append(words[1 : 1 + int(words[0])].tolist())
        cached = self._mapped.get(bucket.counter)
        if cached is not None and cached[0] == addresses:
            return cached
        if any(-1 in words[::ADDRESS_WORDS] for words in addresses):
            return None
        own = self._own_slice(bucket)
        values, homes = list[Tensor](), list[Tensor]()
        for rank, words in enumerate(addresses):
            places = [words[i : i + ADDRESS_WORDS] for i in range(0, len(words), ADDRESS_WORDS)]
            *roots, home = (x[own] for x in self.group.map_peer(rank, places, bucket.dtype, name))
            values += roots
            homes.append(home)
        mapped = self._mapped[bucket.counter] = addresses, values, homes
        return mapped

    def _view(self, memory: Tensor, start: int, like: Tensor) -> Tensor:
        """As many bytes of ``memory`` from ``start`` as ``like`` has, in its dtype."""
        key = memory.data_ptr(), start, like.nbytes, like.dtype
        if (view := self._views.get(key)) is None:
            with torch.inference_mode(False):
                whole = memory.as_strided((start + like.nbytes,), (1,))
                view = self._views[key] = whole[start:].view(like.dtype)
        return view


@cache
def _data_start(length: int) -> int:
    return round_up(length * WORD_BYTES, LINE_BYTES)
