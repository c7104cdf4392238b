"""Nothing travels: every rank adds its slice of all ranks' buckets where they lie. Over shm."""

from __future__ import annotations

from instep.ordered.add_up import add_up
from instep.ordered.buckets import Bucket
from instep.ordered.by_collectives import ByCollectives
from instep.ordered.tree import Sum


class BySharing(ByCollectives):
    """A ``Transport`` of buckets in memory that all ranks have mapped; others travel by collectives.

    A rank adds its slice of all ranks' roots, and writes the sum into all ranks' homes.
    """

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        shown = self.group.expose([*(root for _, root in bucket.counter.roots), bucket.home], name)
        if shown is None:
            super().reduce(bucket, plan, scale, name)
            return
        first = self.group.rank * bucket.slice_length
        own = slice(first, first + bucket.slice_length)
        values = [root[own] for tensors in shown for root in tensors[:-1]]
        add_up(values, plan, scale, [tensors[-1][own] for tensors in shown], bucket.nodes, first)
        self.group.barrier(name)
