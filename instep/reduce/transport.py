"""How slices of a bucket travel between ranks, and how they are added in the order of the sum tree.

``CollectiveTransport`` uses the backend's own all-to-all and all-gather: nccl, and any unknown backend.
``GlooTransport`` sends point-to-point messages, since gloo's all-to-all uses a link one way at a time: a rank
adds its own slices in place, receives the slices of the other ranks, and sends the sum to all. With one rank
nothing travels. A small bucket is all-gathered whole and added up by every rank: one message instead of two.

The plan fixes the order of every element, so neither the length of a piece nor the rank that adds it changes
the bits. The native core makes one pass over memory; without it torch's functions give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from instep.memory import PIECE_BYTES, align_bytes, allocate
from instep.native.library import NO_SCALE, TIMES, core
from instep.net.messages import Messages
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket
from instep.reduce.node_format import BucketNodes
from instep.reduce.tree import Sum

_NATIVE = (torch.float32, torch.float64)
_value, _address = itemgetter(1), Tensor.data_ptr
Payload: TypeAlias = tuple[Bucket, Sum]
"""The bucket that is reduced next, and its plan."""
Parts: TypeAlias = Sequence[tuple[Tensor, int]]
"""Tensors to send or to receive, each with the owner on the other side."""


class Scratch:
    """Receive buffers, one per device and dtype, as large as the largest exchange has needed.

    Each ``take`` reuses the memory of the last one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        return [*self._buffers.values()]

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_elements,) of uninitialised memory."""
        key = (device, dtype)
        if key not in self._buffers or self._buffers[key].numel() < num_elements:
            segment = allocate(num_elements * dtype.itemsize, align_bytes(device), device)
            self._buffers[key] = segment.elements(dtype)
        return self._buffers[key][:num_elements]

    def for_sums(self, bucket: Bucket, home: Tensor) -> Tensor:
        """Memory for the encoded slices of the root that belongs into ``home``; not rounded, ``home``."""
        nodes = bucket.nodes
        if not nodes.rounds:
            return home
        num_slices = len(home) // nodes.slice_length
        return self.take(num_slices * nodes.wire_length, nodes.wire_dtype, home.device)


class CollectiveTransport:
    """Exchanges headers, then moves slices of roots to their owners and the sums to all ranks.

    This class works on any backend; subclasses are faster on one. For each bucket ``exchange_headers``, which
    shows whether all ranks are in the same exchange, then ``reduce``. ``scratch`` holds what is received, R/W
    of the largest bucket for R roots on W ranks. A bucket whose roots take at most ``at_once_bytes`` on all
    ranks together is small.
    """

    at_once_bytes = 256 << 10  # the second message takes as long as sending and adding these

    def __init__(self, group: Group) -> None:
        self.group = group
        self.scratch = Scratch()

    def exchange_headers(self, row: Tensor, name: str, payload: Payload | None = None) -> Tensor:
        """The ``row`` (length,) int64 of every rank, in CPU memory: (W, length).

        In shared memory ranks publish the roots of ``payload`` with it.
        """
        rows = torch.empty((self.group.size, row.numel()), dtype=row.dtype, device=row.device)
        self.group.all_gather(rows.view(-1), row, name)
        return rows

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """Write the sum of all ranks' roots by ``plan``, times ``scale``, to the ``home`` of ``bucket``."""
        if self.group.size == 1:
            roots = local_roots(bucket)
            add_up(roots, plan, scale, [roots[plan.root]], bucket.nodes)
        elif sum(plan.counts) * bucket.nbytes <= self.at_once_bytes:
            self._gather_roots(bucket, plan, scale, name)
        else:
            self._exchange_slices(bucket, plan, scale, name)

    def _exchange_slices(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """All-to-all the slices of the roots, add this rank's slices, all-gather the sums."""
        nodes, size = bucket.nodes, self.group.size
        length, first = nodes.wire_length, self.group.rank * bucket.slice_length
        received = self.scratch.take(sum(plan.counts) * length, nodes.wire_dtype, bucket.device)
        roots = [nodes.encode(root) for root in local_roots(bucket)]
        if len(roots) > 1:  # one message: all slices for rank 0, then for rank 1, ...
            sent = torch.stack([root.view(size, -1) for root in roots], dim=1).view(-1)
        else:
            sent = roots[0] if roots else received[:0]
        splits = [count * length for count in plan.counts]
        self.group.all_to_all(received, sent, splits, [len(roots) * length] * size, name)
        values = [nodes.decode(row, first) for row in received.view(-1, length)]
        own = add_up_to_send(values, plan, scale, nodes, first)
        gathered = self.scratch.for_sums(bucket, bucket.home)
        self.group.all_gather(gathered, own, name)
        nodes.decode_mean(gathered, scale, bucket.home)

    def _gather_roots(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """All-gather the roots whole; every rank adds everything."""
        nodes, size, most = bucket.nodes, self.group.size, max(plan.counts)
        roots, length = local_roots(bucket), nodes.wire_length * size
        memory = self.scratch.take((size + 1) * most * length, nodes.wire_dtype, bucket.device)
        received, sent = memory[: size * most * length], memory[size * most * length :]
        for root, row in zip(roots, sent.split(length), strict=False):
            nodes.encode(root, out=row)
        self.group.all_gather(received, sent, name)
        rows, values = received.view(size, most, length), list[Tensor]()
        for rank, count in enumerate(plan.counts):
            peer_roots = rows[rank, :count].unbind()
            values += map(nodes.decode, peer_roots) if nodes.rounds else peer_roots
        add_up(values, plan, scale, [bucket.counter.home], nodes)


def local_roots(bucket: Bucket) -> list[Tensor]:
    """The roots of this rank, in the order of the tree."""
    return [*map(_value, bucket.counter.roots)]


class GlooTransport(CollectiveTransport):
    """Exchanges buckets on the CPU by messages, buckets on another device by collectives."""

    def _exchange_slices(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super()._exchange_slices(bucket, plan, scale, name)
            return
        messages, roots = Messages(self.group.pg, self.group.ranks), local_roots(bucket)
        own, scratch = self.group.rank, self.scratch

        def exchange() -> None:
            for sent, received in slice_rounds(bucket, bucket.home, roots, plan, scale, own, scratch):
                messages.together(sent, received)

        self.group.run(exchange, name)  # in one piece: each switch to another thread costs time


def slice_rounds(
    bucket: Bucket,
    home: Tensor,
    roots: Sequence[Tensor],
    plan: Sum,
    scale: float,
    own: int,
    scratch: Scratch,
    start: int = 0,
) -> Iterator[tuple[Parts, Parts]]:
    """Reduce the ``roots`` of all owners to ``home``: owner o adds slice o, and this rank is owner ``own``.

    ``home`` and every root are elements ``start`` and following of ``bucket``. Yields the tensors to send and
    to receive, which the caller transfers before it resumes the generator.
    """
    nodes, num_owners, length = bucket.nodes, len(plan.counts), bucket.slice_length
    others = [(own + k) % num_owners for k in range(1, num_owners)]
    firsts = [start + owner * length for owner in range(num_owners)]
    slices = [root.split(length) for root in roots]
    memory = scratch.take(
        (sum(plan.counts) - len(roots)) * nodes.wire_length, nodes.wire_dtype, bucket.device
    )
    counts = [0 if owner == own else count for owner, count in enumerate(plan.counts)]
    rows = memory.view(-1, nodes.wire_length).split(counts)
    yield (
        [(nodes.encode(each[to], firsts[to]), to) for to in others for each in slices],
        [(row, source) for source in others for row in rows[source]],
    )
    values = list[Tensor]()
    for owner in range(num_owners):
        if owner == own:
            values += [each[own] for each in slices]
        else:
            values += [nodes.decode(row, firsts[own]) for row in rows[owner]]
    gathered = scratch.for_sums(bucket, home)
    means = gathered.split(nodes.wire_length)
    add_up_to_send(values, plan, scale, nodes, firsts[own], means[own])
    yield [(means[own], to) for to in others], [(means[source], source) for source in others]
    nodes.decode_mean(gathered, scale, home, start)


def add_up(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    homes: Sequence[Tensor],
    nodes: BucketNodes,
    first: int = 0,
    read_only: Collection[int] = (),
) -> None:
    """Write the sum of ``values`` by ``plan``, times ``scale``, to each of ``homes``.

    All tensors are flat and contiguous, of one dtype and length. A home may be one of the values. All values
    may be overwritten but those at the positions ``read_only``. They are elements ``first`` and following of
    a bucket with ``nodes``.
    """
    is_native = not nodes.rounds and values[0].is_cpu and values[0].dtype in _NATIVE
    if is_native and (native := core()) is not None:
        length, itemsize = values[0].numel(), values[0].dtype.itemsize
        finish = (NO_SCALE, 1.0) if scale == 1.0 else (TIMES, scale)
        from_, to = tuple(map(_address, values)), tuple(map(_address, homes))
        if native.add_up(from_, plan.adds, plan.root, to, length, itemsize, finish=finish):
            return
    root = values[plan.root]
    others = [home for home in homes if plan.root in read_only or home.data_ptr() != root.data_ptr()]
    # In pieces, so that partial sums stay in the cache; on a GPU in one call per add.
    most = PIECE_BYTES // root.dtype.itemsize if root.is_cpu else max(1, len(root))
    for start in range(0, len(root), most):
        terms = [value[start : start + most] for value in values]
        terms = [term.clone() if i in read_only else term for i, term in enumerate(terms)]
        for (left, right), node in zip(plan.adds, plan.sums, strict=True):
            nodes.add(terms[left], terms[right], node, first + start)
        if scale != 1.0:
            terms[plan.root].mul_(scale)
        for home in others:
            home[start : start + most].copy_(terms[plan.root])


def add_up_to_send(
    values: Sequence[Tensor],
    plan: Sum,
    scale: float,
    nodes: BucketNodes,
    first: int = 0,
    slot: Tensor | None = None,
) -> Tensor:
    """The sum of ``values``, a slice, encoded for the all-gather, in ``slot`` if given.

    A rounded sum travels unscaled; ``nodes.decode_mean`` scales it.
    """
    root = values[plan.root]
    if nodes.rounds:
        add_up(values, plan, 1.0, [root], nodes, first)
        return nodes.encode(root, first, slot)
    slot = root if slot is None else slot
    add_up(values, plan, scale, [slot], nodes, first)
    return slot
