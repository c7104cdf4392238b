"""Slices travel in messages from rank to rank: over gloo, whose all-to-all uses a link one way at a time."""

from __future__ import annotations

from instep.comm import direct
from instep.comm.messages import Messages
from instep.comm.perform import perform
from instep.ordered.add_up import add_up_to_send
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
        nodes, size, first = bucket.nodes, self.group.size, self.group.rank * bucket.slice_length
        length = nodes.wire_length
        received = self.scratch.take(sum(plan.counts) * length, nodes.wire_dtype, bucket.device)
        sent = by_owner([nodes.encode(root) for root in own_roots], size, received[:0])
        parts = sent.split([len(own_roots) * length] * size)
        out = received.split([count * length for count in plan.counts])
        messages = Messages(self.group.pg, self.group.ranks)
        self.group.run(lambda: direct.all_to_all(parts, messages, out), name)
        values = [nodes.decode(row, first) for row in received.view(-1, length)]
        gathered = nodes.gathered(bucket.home, self.scratch)
        slices = gathered.split(length)
        add_up_to_send(values, plan, scale, nodes, first, slices[self.group.rank])
        self.group.run(lambda: perform(direct.all_gather, slices, messages), name)
        nodes.decode_mean(gathered, scale, bucket.home)
