"""Slices travel in messages from rank to rank: over gloo, whose all-to-all uses a link one way at a time.

Own slices are added where they lie; those of the other ranks are received, and the sum is sent back to all. A
small bucket travels whole instead, by one all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from instep.comm.messages import Messages
from instep.ordered.add_up import add_up_to_send
from instep.ordered.buckets import Bucket
from instep.ordered.collective_transport import CollectiveTransport, values_of
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum

Parts: TypeAlias = Mapping[int, Sequence[Tensor]]
"""By owner, the tensors sent to it, or received from it."""


class GlooTransport(CollectiveTransport):
    """A ``Transport`` of buckets on the CPU; those on another device travel by the backend's collectives."""

    def _exchange_slices(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super()._exchange_slices(bucket, plan, scale, name)
            return
        messages = Messages(self.group.pg, self.group.ranks)
        slices = OwnedSlices(bucket, bucket.home, self.group.rank, 0, self.scratch)
        roots = values_of(bucket)

        def exchange() -> None:
            for sent, received in slices.rounds(roots, plan, scale):
                messages.together(_in_turn(sent), _in_turn(received))

        self.group.run(exchange, name)  # in one piece: each turn of another thread costs time


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
