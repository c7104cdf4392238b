"""Slices travel in messages from rank to rank: over gloo, whose all-to-all uses a link one way at a time."""

from __future__ import annotations

from instep.comm import direct
from instep.comm.messages import Messages
from instep.comm.perform import perform
from instep.ordered.add_up import add_up
from instep.ordered.buckets import Bucket
from instep.ordered.by_collectives import ByCollectives, by_owner
from instep.ordered.tree import Sum


class ByMessages(ByCollectives):
    """A ``Transport`` of buckets on the CPU; those on another device travel by the backend's collectives."""

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super().reduce(bucket, plan, scale, name)
            return
        own_roots = [root for _, root in bucket.counter.roots]
        size, length = self.group.size, bucket.slice_length
        received = self.scratch.take(sum(plan.counts) * length, bucket.dtype, bucket.device)
        parts = by_owner(own_roots, size, length, bucket.home).split([len(own_roots) * length] * size)
        out = received.split([count * length for count in plan.counts])
        messages = Messages(self.group.pg, self.group.ranks)
        self.group.run(lambda: direct.all_to_all(parts, messages, out), name)
        slices = bucket.home.split(length)
        add_up(list(received.view(-1, length)), plan, scale, [slices[self.group.rank]])
        self.group.run(lambda: perform(direct.all_gather, slices, messages), name)
