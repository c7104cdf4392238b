"""Slices travel by the backend's own all-to-all and all-gather: over nccl, and where nothing better is known.

With one rank nothing travels, and the sum is made where its roots lie. What is small travels whole to all
ranks, and all add everything: one message, where slices take two.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from instep.mesh.process_group import Group
from instep.ordered.add_up import add_up, add_up_to_send
from instep.ordered.buckets import Bucket
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum

_value = itemgetter(1)
# Of all roots of a bucket together. A second message takes as long as so much takes to travel, and to add.
AT_ONCE_BYTES = 256 << 10


class CollectiveTransport:
    """A ``Transport`` (``ordered/exchange.py``) that any backend can be.

    ``scratch`` is for what it receives: R/W of the largest bucket. Buckets of which all roots together have
    ``at_once_bytes`` are small.
    """

    def __init__(self, group: Group, scratch: Scratch, *, at_once_bytes: int = AT_ONCE_BYTES) -> None:
        self.group = group
        self.scratch = scratch
        self.at_once_bytes = at_once_bytes

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that it keeps for what it receives."""
        return self.scratch.buffers

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        """The ``row`` (length,) of every rank: (W, length)."""
        rows = torch.empty((self.group.size, row.numel()), dtype=row.dtype, device=row.device)
        self.group.all_gather(rows.view(-1), row, name)
        return rows

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """The sum of all ranks' roots, times ``scale``, into the ``home`` of ``bucket``."""
        if self.group.size == 1:
            own_roots = values_of(bucket)
            add_up(own_roots, plan, scale, [own_roots[plan.root]], bucket.nodes)
        elif sum(plan.counts) * bucket.nbytes <= self.at_once_bytes:
            self._gather_everything(bucket, plan, scale, name)
        else:
            self._exchange_slices(bucket, plan, scale, name)

    def _exchange_slices(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """An all-to-all of root slices, a local sum, an all-gather of its result."""
        own_roots, nodes, size = values_of(bucket), bucket.nodes, self.group.size
        length, first = nodes.wire_length, self.group.rank * bucket.slice_length
        received = self.scratch.take(sum(plan.counts) * length, nodes.wire_dtype, bucket.device)
        splits = [count * length for count in plan.counts]
        own_splits = [len(own_roots) * length] * size
        sent = by_owner([nodes.encode(root) for root in own_roots], size, received[:0])
        self.group.all_to_all(received, sent, splits, own_splits, name)
        values = [nodes.decode(row, first) for row in received.view(-1, length)]
        own = add_up_to_send(values, plan, scale, nodes, first)
        gathered = nodes.gathered(bucket.home, self.scratch)
        self.group.all_gather(gathered, own, name)
        nodes.decode_mean(gathered, scale, bucket.home)

    def _gather_everything(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        """All roots come to all ranks, whole, in one message; each adds them up."""
        nodes, size, most = bucket.nodes, self.group.size, max(plan.counts)
        roots, length = values_of(bucket), nodes.wire_length * size
        alone = most == len(roots) == 1  # then it can be sent from where it is
        memory = self.scratch.take((size + (not alone)) * most * length, nodes.wire_dtype, bucket.device)
        received, sent = memory[: size * most * length], memory[size * most * length :]
        for root, row in zip(roots, () if alone else sent.split(length), strict=False):
            nodes.encode(root, out=row)
        self.group.all_gather(received, nodes.encode(roots[0]) if alone else sent, name)
        rows, values = received.view(size, most, length), list[Tensor]()
        for rank, count in enumerate(plan.counts):
            its = rows[rank, :count].unbind()
            values += map(nodes.decode, its) if nodes.rounds else its
        add_up(values, plan, scale, [bucket.counter.home], nodes)


def values_of(bucket: Bucket) -> list[Tensor]:
    """The roots of this rank, in the order of the tree."""
    return [*map(_value, bucket.counter.roots)]


def by_owner(roots: Sequence[Tensor], size: int, nothing: Tensor) -> Tensor:
    """The roots, as they travel, as one message: first everything for rank 0, then for rank 1, ..."""
    if len(roots) == 1:
        return roots[0]  # W slices in a row already
    if not roots:
        return nothing
    return torch.stack([root.view(size, -1) for root in roots], dim=1).view(-1)
