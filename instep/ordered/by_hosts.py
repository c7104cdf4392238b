"""Slices travel once per host: its ranks add in shared memory, and share the sending of what they get.

Where L ranks of a host each send to all ranks of the others, a byte of the gradient leaves the host L times.
But the tree says which adds are of leaves of one host, and those need no link. Two hosts, two ranks each,
one leaf a rank (a slice for each place on a host, a part of it for each host):

     host 0   rank 0: a   rank 1: b         host 1   rank 2: c   rank 3: d
                 \\         /                           \\         /
                   a + b                                 c + d            where the buckets lie, by slices
     slice 0:  rank 0 adds  | part 0 | part 1 |      slice 0:  rank 2 adds  | part 0 | part 1 |
     slice 1:  rank 1 adds  | part 0 | part 1 |      slice 1:  rank 3 adds  | part 0 | part 1 |
                                   |_________________________________^            to the same place on
                                          ^__________________________|              the other host
     (a + b) + (c + d), times the scale: part 0 on host 0, part 1 on host 1
     each sends its part to the same place on the other host, and writes the slice into the buckets of its own

A host sends 2 S (H-1)/H bytes of a bucket of S bytes if its leaves make one root, whatever L is, and
(r + 1) S (H-1)/H if they make r; by messages, with as many roots on each rank, it is L times as much. Headers
too: the ranks of a host collect theirs in shared memory, and one message to each other host has them all.

H: hosts. L: ranks on each; W = H L. Rank h L + i is at place i on host h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.messages import Messages
from instep.errors import PeerLost
from instep.mesh.host_group import HostGroup
from instep.ordered.add_up import add_up, add_up_to_send
from instep.ordered.buckets import Bucket
from instep.ordered.by_messages import ByMessages
from instep.ordered.by_sharing import BySharing
from instep.ordered.scratch import Scratch
from instep.ordered.tree import Sum, by_host

SPEAKER = 0  # the place on each host whose rank sends the headers of all


class ByHosts(ByMessages):
    """A ``Transport`` of buckets that the ranks of each host have mapped; of others, by messages."""

    group: HostGroup

    def __init__(self, group: HostGroup, scratch: Scratch) -> None:
        super().__init__(group, scratch)
        assert group.near is not None
        self.near = group.near
        self._sharing = BySharing(group.near, scratch, at_once_bytes=0)
        self._others = [(group.host + k) % group.num_hosts for k in range(1, group.num_hosts)]

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        group, near = self.group, self.near
        rows = torch.empty(group.num_hosts, near.size * len(row), dtype=row.dtype, device=row.device)
        own = rows[group.host]
        with group.operation(name):
            own.view(near.size, len(row)).copy_(self._sharing.meet(row, name, bucket, plan))
            if group.place == SPEAKER:
                self._across([[own]] * len(self._others), [[rows[host]] for host in self._others], name)
            near.broadcast(rows, name, root=SPEAKER)
        return rows.view(group.size, len(row))

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super().reduce(bucket, plan, scale, name)
            return
        group, near, nodes = self.group, self.near, bucket.nodes
        subtrees, across = by_host(plan, group.num_local)
        with group.operation(name):
            reached = self._sharing.reach(bucket, plan, name)
            assert reached is not None, "buckets are allocated by their group"
            _, values, homes = reached
            first = self._first(bucket, 0)
            roots = []
            for subtree in subtrees[group.host]:
                members = [values[member] for member in subtree.members]
                roots.append(members[subtree.plan.root])
                if subtree.plan.adds:
                    add_up(members, subtree.plan, 1.0, [roots[-1]], nodes, first)
            parts = [root.split(bucket.slice_length) for root in roots]
            terms = self._collect(bucket, parts, across.counts, name)
            own = homes[group.place]
            self._give(bucket, terms, across, scale, own, name)
            for home in homes[: group.place] + homes[group.place + 1 :]:
                home.copy_(own)
            near.barrier(name)

    def _collect(
        self, bucket: Bucket, parts: Sequence[Sequence[Tensor]], counts: Sequence[int], name: str
    ) -> list[Tensor]:
        """This host's part of the roots of all hosts; ``parts[k][h]`` is host h's of root k of this host."""
        nodes, here = bucket.nodes, self.group.host
        num_received = sum(counts) - counts[here]
        rows = self.scratch.take(num_received * nodes.wire_length, nodes.wire_dtype, bucket.device)
        received = iter(rows.view(-1, nodes.wire_length))
        came = {host: [next(received) for _ in range(counts[host])] for host in self._others}
        sent = [
            [nodes.encode(part[host], self._first(bucket, host)) for part in parts] for host in self._others
        ]
        self._across(sent, list(came.values()), name)
        own_first = self._first(bucket, here)
        terms = {host: [nodes.decode(row, own_first) for row in its] for host, its in came.items()}
        terms[here] = [part[here] for part in parts]
        return [term for host in sorted(terms) for term in terms[host]]

    def _give(
        self, bucket: Bucket, terms: Sequence[Tensor], across: Sum, scale: float, home: Tensor, name: str
    ) -> None:
        """This host's part of the sum of ``terms`` to all hosts; and theirs, all into ``home``, a slice."""
        nodes, here = bucket.nodes, self.group.host
        gathered = nodes.gathered(home, self.scratch)
        rows = gathered.split(nodes.wire_length)
        add_up_to_send(terms, across, scale, nodes, self._first(bucket, here), rows[here])
        self._across([[rows[here]]] * len(self._others), [[rows[host]] for host in self._others], name)
        nodes.decode_mean(gathered, scale, home, self._first(bucket, 0))

    def _first(self, bucket: Bucket, host: int) -> int:
        """The first element of the part of this place's slice that ``host`` owns."""
        return (self.group.place * self.group.num_hosts + host) * bucket.slice_length

    def _across(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], name: str
    ) -> None:
        """To this rank's place on each of the other hosts, and from there: all that a link carries."""
        at = [self.group.at(host) for host in self._others]
        sends = [(x, rank) for xs, rank in zip(sent, at, strict=True) for x in xs]
        receives = [(x, rank) for xs, rank in zip(received, at, strict=True) for x in xs]
        messages = Messages(self.group.pg, self.group.ranks)

        def exchange() -> None:
            try:
                messages.together(sends, receives)
            except PeerLost as lost:
                self.group.unreached = lost.ranks
                raise

        self.group.run(exchange, name)
