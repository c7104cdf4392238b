"""A group that spans hosts with several ranks on each: which rank is where, and the ranks of one host together.

Between two ranks of a host a byte costs a copy in memory, between two hosts its share of a link. A group that
sends from every rank to every other does not know the difference, and where a host has L ranks its link
carries what they send L times over. Here the ranks find out whom they share a host with, and meet them in
shared memory, so that what can be done there is done before a byte leaves the host:

    host 0:  rank 0 | rank 1       ranks 0, 1 share memory, ``near`` on both       place 0 on both hosts: 0, 2
    host 1:  rank 2 | rank 3       ranks 2, 3 share memory, ``near`` on both       place 1 on both hosts: 1, 3

It needs the same number of ranks on every host, more than one, ranks of a host with numbers in a row, and
memory that they can share. Else ``near`` is None, on every rank, and the group is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from instep.errors import PeerLost
from instep.memory import Segment
from instep.mesh import device
from instep.mesh.debug_server import StatusStore
from instep.mesh.hang_report import StatusRow
from instep.mesh.peers import Peer
from instep.mesh.process_group import Group, backend_timeout, rendezvous

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

MEETING = "the meeting of the ranks of a host"


def num_on_each_host(table: Sequence[Peer]) -> int | None:
    """How many ranks each host has; None where they have not all as many, or not numbers in a row."""
    hosts = [(host, len(list(peers))) for host, peers in groupby(table, key=lambda p: (p.host, p.pid_space))]
    counts = {count for _, count in hosts}
    if len({host for host, _ in hosts}) < len(hosts) or len(counts) != 1:
        return None
    return counts.pop()


class HostGroup(Group):
    """As ``Group``, with the ranks of each host in shared memory where they can be.

    At construction: the ranks of a host meet in ``store``, if there are several hosts with as many ranks
    each, and all ranks tell whether they could. Collective. Then ``near`` is the group of this host's ranks,
    ``num_local`` of them, on host number ``host``, and ``allocate`` gives memory that they can ``expose``.
    ``close`` ends ``near`` too.
    """

    def __init__(
        self,
        pg: ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        status_store: StatusStore | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(pg, ranks, rank, timeout_s, status_store)
        self.near: Group | None = None
        self.num_local = num_on_each_host(self.peers.table) or 1
        self.host, self.place = divmod(self.rank, self.num_local)
        self.num_hosts = self.size // self.num_local
        if store is not None and self.backend == "gloo" and self.num_local > 1 and self.num_hosts > 1:
            self._meet_near(store)

    def at(self, host: int) -> int:
        """The group rank that has this one's place on ``host``."""
        return host * self.num_local + self.place

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """The block is one operation of all ranks, on ``near`` and by ``send_across``.

        Errors name the rank that is lost, wherever it is: where a rank dies, those of its host see it, and
        tell the others by the store.
        """
        assert self._flight is not None and self.near is not None and self.near.pg is not None
        self._flight.begin(name)
        near = self.near.pg
        try:
            yield
        except BaseException as error:
            self._flight.end(failed=True)
            near.abort()  # the ranks of this host would wait for this one
            if isinstance(error, PeerLost) and (dead := self.peers.told()) and set(dead) != {*error.ranks}:
                names = ", ".join(f"rank {rank}" for rank in dead)
                raise PeerLost(f"{names} died: {error}", ranks=dead, operation=name) from None
            raise
        self._flight.end()

    def send_across(self, function: Callable[[], object], operation: str) -> None:
        """Call ``function``, which exchanges messages with ranks of other hosts; as ``run``, in a block."""
        self._await_in_lane(function, operation)

    def allocate(self, nbytes: int, align: int, on_device: torch.device) -> Segment:
        """Memory that the ranks of this host can ``expose`` to each other, where they share any."""
        if self.near is None:
            return super().allocate(nbytes, align, on_device)
        return self.near.allocate(nbytes, align, on_device)

    def give_up(self) -> None:
        super().give_up()
        if self.near is not None:
            self.near.give_up()

    def close(self) -> None:
        if self.near is not None:
            self.near.close()
            self.near = None
        super().close()

    def _meet_near(self, store: Store) -> None:
        first = self.host * self.num_local
        ranks = self.ranks[first : first + self.num_local]

        def share(own: Store) -> ProcessGroup | None:
            return device.share_memory(own, self.place, ranks, backend_timeout(self.timeout_s))

        pg = rendezvous(store, "near", ranks, self.global_rank, self.timeout_s, share)
        found = self.all_gather_bytes(bytes([pg is not None]), MEETING)
        if pg is None or not all(map(any, found)):
            return
        self.near = Group(pg, ranks, self.global_rank, self.timeout_s)
        self.near.peers.status_store = _ToldOn(self.near.peers.status_store, self)


class _ToldOn(StatusStore):
    """The notice board of the ranks of a host, which tells those of other hosts what they wait for as well."""

    def __init__(self, near: StatusStore, group: Group) -> None:
        super().__init__()
        self._near, self._peers = near, group.peers

    def post(self, row: StatusRow) -> None:
        """A wait inside of a host is one of the operation of all: of that the others know."""
        self._peers.status_store.post(self._peers.flight.row())

    def read(self, rank: int) -> StatusRow | None:
        return self._near.read(rank)

    def tell_dead(self, ranks: Sequence[int]) -> None:
        self._peers.status_store.tell_dead(ranks)
