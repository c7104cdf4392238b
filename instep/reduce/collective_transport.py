"""Slices travel by the backend's own all-to-all and all-gather: nccl, and any unknown backend.

With one rank nothing travels. A small bucket is all-gathered whole and added up by every rank: one message
instead of two.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from instep.net.process_group import Group
from instep.reduce.add_up import add_up, add_up_to_send
from instep.reduce.buckets import Bucket
from instep.reduce.scratch import Scratch
from instep.reduce.tree import Sum

_value = itemgetter(1)
# Of all roots of a bucket together: the second message takes as long as sending and adding these bytes.
AT_ONCE_BYTES = 256 << 10
Payload: TypeAlias = tuple[Bucket, Sum]
"""The bucket that is reduced next, and its plan."""


class CollectiveTransport:
    """Exchanges headers, then moves slices of roots to their owners and the sums to all ranks.

    This class works on any backend; subclasses are faster on one. For each bucket ``exchange_headers``, which
    shows whether all ranks are in the same exchange, then ``reduce``. ``scratch`` holds what is received, R/W
    of the largest bucket for R roots on W ranks. A bucket whose roots take at most ``at_once_bytes`` on all
    ranks together is small.
    """

    def __init__(self, group: Group, scratch: Scratch, *, at_once_bytes: int = AT_ONCE_BYTES) -> None:
        self.group = group
        self.scratch = scratch
        self.at_once_bytes = at_once_bytes

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
        gathered = nodes.gathered(bucket.home, self.scratch)
        self.group.all_gather(gathered, own, name)
        nodes.decode_mean(gathered, scale, bucket.home)

    def _gather_roots(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """All-gather the roots whole; every rank adds everything."""
        nodes, size, most = bucket.nodes, self.group.size, max(plan.counts)
        roots, length = local_roots(bucket), nodes.wire_length * size
        in_place = most == len(roots) == 1  # send the root from its own memory
        memory = self.scratch.take((size + (not in_place)) * most * length, nodes.wire_dtype, bucket.device)
        received, sent = memory[: size * most * length], memory[size * most * length :]
        for root, row in zip(roots, () if in_place else sent.split(length), strict=False):
            nodes.encode(root, out=row)
        if in_place:
            sent = nodes.encode(roots[0]) if nodes.rounds else roots[0]
        self.group.all_gather(received, sent, name)
        rows, values = received.view(size, most, length), list[Tensor]()
        for rank, count in enumerate(plan.counts):
            peer_roots = rows[rank, :count].unbind()
            values += map(nodes.decode, peer_roots) if nodes.rounds else peer_roots
        add_up(values, plan, scale, [bucket.counter.home], nodes)


def local_roots(bucket: Bucket) -> list[Tensor]:
    """The roots of this rank, in the order of the tree."""
    return [*map(_value, bucket.counter.roots)]
