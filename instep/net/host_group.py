"""A group that spans hosts with several ranks on each: who is where, and the ranks of one host together.

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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.memory import Segment
from instep.net import device
from instep.net.peers import Peer
from instep.net.process_group import Group, SharedGroup
from instep.net.store import PATIENCE_S, backend_timeout, rendezvous

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

    At construction: the ranks of a host meet in the store of ``pg``, if there are several hosts with as many
    ranks each, and all ranks tell whether they could. Collective. Then ``near`` is the group of this host's
    ranks, ``num_local`` of them, on host number ``host``, and ``allocate`` gives memory for ``map_all``.
    ``close`` ends ``near`` too.
    """

    def __init__(
        self,
        pg: ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        table: Sequence[Peer] | None = None,
        name: str = "",
    ) -> None:
        super().__init__(pg, ranks, rank, timeout_s, table, name)
        self.near: SharedGroup | None = None
        self.unreached: Sequence[int] = ()  # global ranks to which a message did not get, in this operation
        self._boards: list[Tensor] = []  # of each rank of this host: who is lost, 1 by rank, and if by death
        num_local = num_on_each_host(self.peers.table) or self.size
        several = 1 < num_local < self.size
        if pg is not None and self.backend == "gloo" and several:
            self.near = self._meet_near(pg.get_group_store(), num_local)
        self.num_local = self.size if self.near is None else num_local
        self.num_hosts = self.size // self.num_local
        self.host, self.place = divmod(self.rank, self.num_local)
        if self.near is not None:
            self._boards = self._share_boards(self.near)

    @property
    def _way(self) -> str:
        if self.near is None:
            return super()._way
        return f" on {self.num_hosts} hosts, over {self.near.backend} on each and {self.backend} between them"

    def at(self, host: int) -> int:
        """The group rank that has this one's place on ``host``."""
        return host * self.num_local + self.place

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """The block, on ``near`` and by ``run``, is one operation of all ranks.

        Errors name the rank that is lost, wherever it is. A rank that dies, or leaves, is missed on its own
        host first, and at its place on the others; they tell those of their host in memory, and all in the
        store, which may be lost itself.
        """
        assert self.near is not None and self.near.pg is not None
        self._require_whole(name)
        near, near_peers = self.near.pg, self.near.peers
        self.unreached = ()
        try:
            with self.peers.flight.as_one(name):
                yield
        except PeerLost as error:
            explained = self._explained(error, near_peers.dead(), name)
            self._let_go(near)
            raise explained from None
        except BaseException:
            self.break_off(name)
            raise

    def break_off(self, operation: str) -> None:
        super().break_off(operation)
        if self.near is not None and self.near.pg is not None:
            self.near.pg.abort()

    def _let_go(self, near: ProcessGroup) -> None:
        """End the waits for this rank, here and elsewhere, of those who do not wait for the lost one."""
        near.abort()
        if self.pg is not None:
            device.close_connections(self.pg)

    def _explained(self, error: PeerLost, dead: list[int], name: str) -> PeerLost:
        """``error``, or one that names the ranks that it follows from; the others are told of these."""
        lost = self._told_near() or (dead or [*error.ranks] or [*self.unreached], bool(dead))
        ranks, are_dead = self.peers.status_store.report_lost(lost[0], dead=lost[1])
        own = self._boards[self.place]
        own[-1] = are_dead
        for rank in ranks:
            own[self.ranks.index(rank)] = 1
        if not ranks or ranks == [*error.ranks]:
            return error
        names = ", ".join(f"rank {rank}" for rank in ranks)
        what = "died" if are_dead else "did not come, or left"
        return PeerLost(
            f"{names} {what}. What rank {self.global_rank} saw of it: {error}", ranks=ranks, operation=name
        )

    def _told_near(self) -> tuple[list[int], bool] | None:
        """The ranks that another rank of this host found lost, before this one did, and whether they died."""
        for board in self._boards:
            *lost, are_dead = board.tolist()
            if any(lost):
                return [
                    rank for rank, is_lost in zip(self.ranks, lost, strict=True) if is_lost
                ], are_dead == 1
        return None

    def allocate(self, nbytes: int, align: int, on_device: torch.device) -> Segment:
        """Memory that the ranks of this host can map (``map_all``), where they share any."""
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
            self.near, self._boards = None, []
        super().close()

    def _meet_near(self, store: Store, num_local: int) -> SharedGroup | None:
        """The group of this host's ranks in shared memory; None on all ranks if those of a host have none."""
        place = self.rank % num_local
        ranks = self.ranks[self.rank - place :][:num_local]

        def share(own: Store) -> ProcessGroup | None:
            return device.share_memory(own, place, ranks, backend_timeout(self.timeout_s))

        pg = rendezvous(store, "near", ranks, self.global_rank, self.timeout_s, share)
        found = self.all_gather_bytes(bytes([pg is not None]), MEETING)
        if pg is None or not all(map(any, found)):
            return None
        # A rank that waits for one that waits for another host is not to blame it before that has said why.
        near = SharedGroup(pg, ranks, self.global_rank, self.timeout_s + PATIENCE_S)
        near.peers.outer = self.peers
        return near

    def _share_boards(self, near: SharedGroup) -> list[Tensor]:
        own = near.allocate(self.size + 1, 1, torch.device("cpu")).tensor
        shown = near.map_all([own], MEETING)
        assert shown is not None
        return [board for (board,) in shown]


def group_over(
    pg: ProcessGroup | None,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    table: Sequence[Peer] | None = None,
    name: str = "",
    *,
    by_host: bool = False,
) -> Group:
    """The group for the backend of ``pg``; ``by_host``: a ``HostGroup`` unless all share memory."""
    if device.shares_memory(pg):
        return SharedGroup(pg, ranks, rank, timeout_s)
    return (HostGroup if by_host else Group)(pg, ranks, rank, timeout_s, table, name)
