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

import torch
from torch import Tensor

from instep.comm.messages import Messages
from instep.errors import PeerLost
from instep.mesh.host_group import HostGroup
from instep.ordered.add_up import add_up
from instep.ordered.buckets import Bucket
from instep.ordered.collective_transport import CollectiveTransport
from instep.ordered.gloo_transport import OwnedSlices, Parts
from instep.ordered.scratch import Scratch
from instep.ordered.shm_transport import ShmTransport
from instep.ordered.tree import Sum, by_host

SPEAKER = 0  # the place on each host whose rank sends the headers of all


class HierarchicalTransport(CollectiveTransport):
    """A ``Transport`` of buckets that the ranks of each host have mapped; others travel by collectives."""

    group: HostGroup

    def __init__(self, group: HostGroup, scratch: Scratch) -> None:
        super().__init__(group, scratch)
        assert group.near is not None
        self.near = group.near
        self._sharing = ShmTransport(group.near, scratch, at_once_bytes=0)
        self._others = [(group.host + k) % group.num_hosts for k in range(1, group.num_hosts)]

    def meet(self, row: Tensor, name: str, bucket: Bucket | None = None, plan: Sum | None = None) -> Tensor:
        group, near = self.group, self.near
        rows = torch.empty(group.num_hosts, near.size * len(row), dtype=row.dtype, device=row.device)
        own = rows[group.host]
        with group.operation(name):
            own.view(near.size, len(row)).copy_(self._sharing.meet(row, name, bucket, plan))
            if group.place == SPEAKER:
                sent = {host: [own] for host in self._others}
                self._across(sent, {host: [rows[host]] for host in self._others}, name)
            near.broadcast(rows, name, root=SPEAKER)
        return rows.view(group.size, len(row))

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super().reduce(bucket, plan, scale, name)
            return
        group, near = self.group, self.near
        subtrees, across = by_host(plan, group.num_local)
        with group.operation(name):
            reached = self._sharing.map_roots(bucket, plan, name)
            assert reached is not None, "buckets are allocated by their group"
            _, values, homes = reached
            first = group.place * group.num_hosts * bucket.slice_length  # every host owns a part of a slice
            roots = []
            for subtree in subtrees[group.host]:
                members = [values[member] for member in subtree.members]
                roots.append(members[subtree.plan.root])
                if subtree.plan.adds:
                    add_up(members, subtree.plan, 1.0, [roots[-1]], bucket.nodes, first)
            own = homes[group.place]
            slices = OwnedSlices(bucket, own, group.host, first, self.scratch)
            for sent, received in slices.rounds(roots, across, scale):
                self._across(sent, received, name)
            for home in homes[: group.place] + homes[group.place + 1 :]:
                home.copy_(own)
            near.barrier(name)

    def _across(self, sent: Parts, received: Parts, name: str) -> None:
        """By host, to this rank's place there, and from there: all that a link carries."""
        sends = [(x, self.group.at(host)) for host, xs in sent.items() for x in xs]
        receives = [(x, self.group.at(host)) for host, xs in received.items() for x in xs]
        messages = Messages(self.group.pg, self.group.ranks)

        def exchange() -> None:
            try:
                messages.together(sends, receives)
            except PeerLost as lost:
                self.group.unreached = lost.ranks
                raise

        self.group.run(exchange, name)
