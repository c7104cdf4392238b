"""Slices travel in messages from rank to rank: over gloo, whose all-to-all uses a link one way at a time."""

from __future__ import annotations

from instep.comm import direct
from instep.comm.messages import Messages
from instep.comm.perform import perform
from instep.ordered.add_up import add_up_to_send
from instep.ordered.buckets import Bucket
from instep.ordered.by_collectives import ByCollectives
from instep.ordered.tree import Sum


class ByMessages(ByCollectives):
    """A ``Transport`` of buckets on the CPU; those on another device travel by the backend's collectives."""

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu" or self._is_small(bucket, plan):
            super().reduce(bucket, plan, scale, name)
            return
        # In one piece, because the thread that waits for messages is another one.
        self.group.run(lambda: self._exchange(bucket, plan, scale), name)

    def _exchange(self, bucket: Bucket, plan: Sum, scale: float) -> None:
        """Own slices are added where they lie; those of the others are received, and the sum is sent back."""
        group, nodes, length = self.group, bucket.nodes, bucket.slice_length
        others = [(group.rank + k) % group.size for k in range(1, group.size)]
        messages = Messages(group.pg, group.ranks)
        own_roots = [root for _, root in bucket.counter.roots]
        num_received = sum(plan.counts) - len(own_roots)
        memory = self.scratch.take(num_received * nodes.wire_length, nodes.wire_dtype, bucket.device)
        rows = iter(memory.view(-1, nodes.wire_length))
        came = {source: [next(rows) for _ in range(plan.counts[source])] for source in others}
        messages.together(
            [
                (nodes.encode(root[to * length : (to + 1) * length], to * length), to)
                for to in others
                for root in own_roots
            ],
            [(row, source) for source, its in came.items() for row in its],
        )
        first = group.rank * length
        terms = {source: [nodes.decode(row, first) for row in its] for source, its in came.items()}
        terms[group.rank] = [root[first : first + length] for root in own_roots]
        values = [term for rank in range(group.size) for term in terms[rank]]
        gathered = nodes.gathered(bucket.home, self.scratch)
        slices = gathered.split(nodes.wire_length)
        add_up_to_send(values, plan, scale, nodes, first, slices[group.rank])
        perform(direct.all_gather, slices, messages)
        nodes.decode_mean(gathered, scale, bucket.home)
