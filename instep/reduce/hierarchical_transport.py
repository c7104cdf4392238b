"""Each host adds its ranks' roots in shared memory, then its ranks share the messages to the other hosts.

If all L ranks of a host sent to all ranks of the other hosts, each byte of the gradient would leave the host
L times. The tree says which adds are between leaves of one host, and these need no link. Two hosts, two
ranks each, one leaf per rank (a slice per local rank, one part of the slice per host):

     host 0   rank 0: a   rank 1: b         host 1   rank 2: c   rank 3: d
                 \\         /                           \\         /
                   a + b                                 c + d            in the buckets, by slices
     slice 0:  rank 0 adds  | part 0 | part 1 |      slice 0:  rank 2 adds  | part 0 | part 1 |
     slice 1:  rank 1 adds  | part 0 | part 1 |      slice 1:  rank 3 adds  | part 0 | part 1 |
                                   |_________________________________^            to the same local rank
                                          ^__________________________|              on the other host
     (a + b) + (c + d), times the scale: part 0 on host 0, part 1 on host 1
     each rank sends its part to the same local rank of the other host, and writes the slice to all homes

For a bucket of S bytes a host sends 2 S (H-1)/H bytes if its leaves make one root, whatever L is, and
(r + 1) S (H-1)/H if they make r; with r roots on each rank, flat messages would be L times as much. One
local rank exchanges the headers of its whole host.

H: hosts. L: ranks per host; W = H L. Rank h L + i is at place i on host h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.net.host_group import HostGroup
from instep.net.messages import Messages
from instep.reduce.buckets import Bucket
from instep.reduce.shm_transport import ShmTransport
from instep.reduce.transport import CollectiveTransport, Parts, Payload, add_up, slice_rounds
from instep.reduce.tree import Sum, by_host

LEADER = 0  # the place on each host whose rank exchanges the headers


class HierarchicalTransport(CollectiveTransport):
    """Exchanges buckets that all ranks of a host have mapped, buckets on another device by collectives."""

    group: HostGroup

    def __init__(self, group: HostGroup) -> None:
        super().__init__(group)
        assert group.near is not None
        self.near = group.near
        self._local = ShmTransport(group.near)
        self._local.at_once_bytes = 0
        self._other_hosts = [(group.host + k) % group.num_hosts for k in range(1, group.num_hosts)]

    def exchange_headers(self, row: Tensor, name: str, payload: Payload | None = None) -> Tensor:
        group, near = self.group, self.near
        rows = torch.empty(group.num_hosts, near.size * len(row), dtype=row.dtype, device=row.device)
        own = rows[group.host]
        with group.operation(name):
            own.view(near.size, len(row)).copy_(self._local.exchange_headers(row, name, payload))
            if group.place == LEADER:
                others = self._other_hosts
                self._exchange(
                    [(own, host) for host in others], [(rows[host], host) for host in others], name
                )
            near.broadcast(rows, name, root=LEADER)
        return rows.view(group.size, len(row))

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if bucket.device.type != "cpu":
            super().reduce(bucket, plan, scale, name)
            return
        group, near, nodes = self.group, self.near, bucket.nodes
        subtrees, across = by_host(plan, group.num_local)
        with group.operation(name):
            mapped = self._local.map_slices(bucket, plan, name)
            assert mapped is not None, "buckets are allocated by their group"
            _, values, homes = mapped
            # Of this rank's slice, which has a part per host.
            first = group.place * group.num_hosts * bucket.slice_length
            roots = []
            for subtree in subtrees[group.host]:
                members = [values[member] for member in subtree.members]
                roots.append(members[subtree.plan.root])
                if subtree.plan.adds:
                    add_up(members, subtree.plan, 1.0, [roots[-1]], nodes, first)
            own = homes[group.place]
            rounds = slice_rounds(bucket, own, roots, across, scale, group.host, self.scratch, first)
            for sent, received in rounds:
                self._exchange(sent, received, name)
            for home in homes[: group.place] + homes[group.place + 1 :]:
                home.copy_(own)
            near.barrier(name)

    def _exchange(self, sent: Parts, received: Parts, name: str) -> None:
        """Send and receive, by host, with the same local rank of the other hosts."""
        sends, receives = ([(x, self.group.at(host)) for x, host in parts] for parts in (sent, received))
        messages = Messages(self.group.pg, self.group.ranks)

        def exchange() -> None:
            try:
                messages.together(sends, receives)
            except PeerLost as lost:
                self.group.unreached = lost.ranks
                raise

        self.group.run(exchange, name)
