"""A group that spans several hosts with several ranks on each; the ranks of a host share memory.

Between two ranks of a host a byte costs a copy in memory, between two hosts its share of a link. If every
rank sends to every other and a host has L ranks, its link carries the same data L times. So the ranks of a
host form a group in shared memory and do there whatever can be done before a byte leaves the host:

    host 0:  rank 0 | rank 1       ranks 0, 1 share memory: ``near`` of both       place 0 on both hosts: 0, 2
    host 1:  rank 2 | rank 3       ranks 2, 3 share memory: ``near`` of both       place 1 on both hosts: 1, 3

This needs the same number of ranks on every host, more than one, consecutive ranks on a host, and memory that
they can share. Otherwise ``near`` is None on every rank, and the group works like ``Group``.
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

NEAR = "the creation of the groups in shared memory"


def num_on_each_host(table: Sequence[Peer]) -> int | None:
    """Ranks per host; None if hosts differ, or the ranks of a host are not consecutive."""
    hosts = [(host, len(list(peers))) for host, peers in groupby(table, key=lambda p: (p.host, p.pid_space))]
    counts = {count for _, count in hosts}
    if len({host for host, _ in hosts}) < len(hosts) or len(counts) != 1:
        return None
    return counts.pop()


class HostGroup(Group):
    """A ``Group`` in which the ranks of each host share memory where possible.

    The constructor is collective: with several hosts of equal size, the ranks of each host create ``near``
    over the store of ``pg``, and all ranks exchange whether that worked. ``num_local`` ranks are on each
    host, this one on host number ``host``; ``allocate`` returns memory for ``map_all``. ``close`` ends
    ``near`` too.
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
        self.unreached: Sequence[int] = ()  # global ranks that a message of this operation did not reach
        self._boards: list[Tensor] = []  # one per local rank: 1 for each lost rank, and whether it died
        num_local = num_on_each_host(self.peers.table) or self.size
        several = 1 < num_local < self.size
        if pg is not None and self.backend == "gloo" and several:
            self.near = self._make_near(pg.get_group_store(), num_local)
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
        """The group rank at this rank's place on ``host``."""
        return host * self.num_local + self.place

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """The block, on ``near`` and in ``run``, is one operation of all ranks.

        Errors name the lost rank, wherever it is. The ranks of its host and the ranks at its place on other
        hosts notice first; they report it to their host in shared memory, and to all in the store, which may
        be lost itself.
        """
        assert self.near is not None and self.near.pg is not None
        if self._interrupted:
            raise self._interruption(name)
        near, near_peers = self.near.pg, self.near.peers
        self.unreached = ()
        try:
            with self.peers.flight.as_one(name):
                yield
        except PeerLost as error:
            explained = self._with_cause(error, near_peers.dead(), name)
            self._end_waits(near)
            raise explained from None
        except BaseException:
            self.break_off(name)
            raise

    def break_off(self, operation: str) -> None:
        super().break_off(operation)
        if self.near is not None and self.near.pg is not None:
            self.near.pg.abort()

    def _end_waits(self, near: ProcessGroup) -> None:
        """End the waits for this rank on ranks that do not wait for the lost one."""
        near.abort()
        if self.pg is not None:
            device.close_connections(self.pg)

    def _with_cause(self, error: PeerLost, dead: list[int], name: str) -> PeerLost:
        """``error``, or one that names the ranks that caused it; reports these to the other ranks."""
        lost = self._reported_near() or (dead or [*error.ranks] or [*self.unreached], bool(dead))
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

    def _reported_near(self) -> tuple[list[int], bool] | None:
        """Lost ranks that another rank of this host has reported, and whether they died."""
        for board in self._boards:
            *lost, are_dead = board.tolist()
            if any(lost):
                return [
                    rank for rank, is_lost in zip(self.ranks, lost, strict=True) if is_lost
                ], are_dead == 1
        return None

    def allocate(self, nbytes: int, align: int, on_device: torch.device) -> Segment:
        """Memory that the ranks of this host can map, if they share memory."""
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

    def _make_near(self, store: Store, num_local: int) -> SharedGroup | None:
        """The group of this host's ranks in shared memory; None on all ranks unless every host has one."""
        place = self.rank % num_local
        ranks = self.ranks[self.rank - place :][:num_local]

        def share(own: Store) -> ProcessGroup | None:
            return device.share_memory(own, place, ranks, backend_timeout(self.timeout_s))

        pg = rendezvous(store, "near", ranks, self.global_rank, self.timeout_s, share)
        found = self.all_gather_bytes(bytes([pg is not None]), NEAR)
        if pg is None or not all(map(any, found)):
            return None
        # A local rank may itself wait for another host: it reports the cause first.
        near = SharedGroup(pg, ranks, self.global_rank, self.timeout_s + PATIENCE_S)
        near.peers.outer = self.peers
        return near

    def _share_boards(self, near: SharedGroup) -> list[Tensor]:
        own = near.allocate(self.size + 1, 1, torch.device("cpu")).tensor
        shown = near.map_all([own], NEAR)
        assert shown is not None
        return [board for (board,) in shown]


def group_class(pg: ProcessGroup | None, *, by_host: bool = False) -> type[Group]:
    """The class for the backend of ``pg``; ``by_host``: ``HostGroup``, unless all ranks share memory."""
    if device.shares_memory(pg):
        return SharedGroup
    return HostGroup if by_host else Group
