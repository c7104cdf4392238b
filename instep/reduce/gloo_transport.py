"""Slices travel in point-to-point messages: over gloo, whose all-to-all uses a link one way at a time.

A rank adds its own slices in place, receives the slices of the other ranks, and sends the sum to all. A small
bucket is all-gathered whole instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from instep.net.messages import Messages
from instep.reduce.add_up import add_up_to_send
from instep.reduce.buckets import Bucket
from instep.reduce.collective_transport import CollectiveTransport, local_roots
from instep.reduce.scratch import Scratch
from instep.reduce.tree import Sum

Parts: TypeAlias = Sequence[tuple[Tensor, int]]
"""Tensors to send or to receive, each with the owner on the other side."""


class GlooTransport(CollectiveTransport):
    """Exchanges buckets on the CPU by messages, buckets on another device by collectives."""

    def _exchange_slices(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super()._exchange_slices(bucket, plan, scale, name)
            return
        messages, roots, rank = (
            Messages(self.group.pg, self.group.ranks),
            local_roots(bucket),
            self.group.rank,
        )

        def exchange() -> None:
            for sent, received in slice_rounds(bucket, bucket.home, roots, plan, scale, rank, self.scratch):
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
    gathered = nodes.gathered(home, scratch)
    means = gathered.split(nodes.wire_length)
    add_up_to_send(values, plan, scale, nodes, firsts[own], means[own])
    yield [(means[own], to) for to in others], [(means[source], source) for source in others]
    nodes.decode_mean(gathered, scale, home, start)
