"""Rounds: every rank writes, every rank posts, every rank reads; all collectives are made of these.

In round k a rank fills its half number k % 2, posts the round, waits until all ranks have posted it, and
reads what it needs from their halves. Two halves make one wait per round enough: a rank that posts round
k + 1 has read all of round k, so when round k + 1 is complete, half k % 2 is free again.

    rank 0   fill half 1 | post 1 . . . wait | read halves 1, fill half 0 | post 2 . . wait | read ...
    rank 1   fill half 1 . . . . | post 1    | read halves 1, fill half 0 . . . | post 2    | read ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import pointer
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.memory import bytes_of, tensor_of
from instep.native.library import ReductionView
from instep.net.hang_report import ROW_BYTES, FlightRecorder, Problem, StatusRow, different_calls
from instep.net.peers import Peer, Peers, describe
from instep.shm.call import CALL_BYTES, LOCATION, NOWHERE, SLOT_BYTES, Location, announcement, disagreement
from instep.shm.group_segment import HERE, LEFT, SLOTS, GroupSegment
from instep.shm.segment import Words

# Longer than two awake ranks need for a round (2 us), shorter than falling asleep and waking takes (17 us).
SPIN_S = 15e-6
SLICE_S = 0.02  # of sleep in the native core, between checks of liveness and deadline
ANY_SLICE_S = 0.001  # of sleep on one of several words
TABLE_S = 1.0  # for the exchange of status rows after a disagreement
_NS = 1_000_000_000


class Rounds:
    """The rounds of a group, as group rank ``shared.rank`` goes through them; one thread at a time.

    Everything that waits raises ``PeerLost`` if a rank is gone, has left the group or does not come.
    """

    def __init__(
        self,
        shared: GroupSegment,
        table: Sequence[Peer],
        timeout_s: float,
        flight: FlightRecorder | None = None,
    ) -> None:
        self.shared, self.rank, self.size = shared, shared.rank, shared.size
        self.ranks = [peer.rank for peer in table]
        self.peers = Peers(table, table[shared.rank], timeout_s, flight=flight)
        self.flight = self.peers.flight
        self.number = shared.words[shared.posted[shared.rank]]  # rounds so far
        is_crowded = shared.size > len(os.sched_getaffinity(0))
        self.spin_s = 0.0 if is_crowded else SPIN_S  # before a wait for one word sleeps
        shared.view.spin_ns, shared.view.yields = int(SPIN_S * _NS), is_crowded
        self.reduction = ReductionView(group=pointer(shared.view), calls=SLOTS, call_stride=SLOT_BYTES)
        self.reduction.call_bytes, self.reduction.location_bytes = CALL_BYTES, LOCATION.size

    def mine(self) -> Tensor:
        """This rank's half of the next round, ``HALF_BYTES`` in all."""
        return self.shared.rows[(self.number + 1) & 1][self.rank]

    def theirs(self, rank: int) -> Tensor:
        """The half of group rank ``rank`` in the current round; read only."""
        return self.shared.rows[self.number & 1][rank]

    def synchronize(self, label: str, timeout_s: float | None = None) -> None:
        """Post the next round and wait until all ranks have; ``label`` names the operation in errors."""
        shared = self.shared
        self.number += 1
        if shared.core.post_round(shared.view, self.number) and shared.core.await_round(
            shared.view, self.number, self.slice_ns(timeout_s)
        ):
            self.await_all(label, self.number, timeout_s)

    def slice_ns(self, timeout_s: float | None) -> int:
        """How long the native core may sleep: it checks neither liveness nor deadlines."""
        return int(min(SLICE_S, self.peers.timeout_s if timeout_s is None else timeout_s) * _NS)

    def await_all(self, label: str, number: int, timeout_s: float | None = None) -> None:
        """Wait until all other ranks have posted round ``number``."""
        awaited = {rank: (self.shared.words, word, number) for rank, word in enumerate(self.shared.posted)}
        Arrival(self.shared, self.peers, awaited, label).wait_by_deadline(timeout_s)

    def announce(self, call: str, label: str, location: Location = NOWHERE) -> None:
        """Write down the call that the next round belongs to."""
        self.flight.begin(label, call)
        self.shared.write_slot(self.number + 1, announcement(call, location))

    def require_agreement(self, label: str) -> list[Location]:
        """The locations that all ranks have announced for the current round, with the same call.

        Raises:
            Desync: the calls differ; raised on every rank alike.
        """
        slots = self.shared.slots(self.number)
        if problem := disagreement(slots, self.ranks):
            raise self._out_of_step(problem, label)
        return [Location(*LOCATION.unpack(slot[CALL_BYTES:])) for slot in slots]

    def _out_of_step(self, problem: Problem, label: str) -> Desync:
        """As ``Group.out_of_step``: all ranks have found the disagreement, and exchange their status."""
        row = replace(self.flight.row(), stack=()).to_bytes().ljust(ROW_BYTES)
        with suppress(PeerLost, ValueError):
            self.mine()[: len(row)].copy_(tensor_of(row, torch.uint8))
            self.synchronize(label, TABLE_S)
            halves = [self.theirs(rank)[: len(row)] for rank in range(self.size)]
            rows = [StatusRow.from_bytes(bytes_of(half)) for half in halves]
            return different_calls(rows).as_desync(rows, self.rank)
        return Desync(str(problem))

    @contextmanager
    def reaching(self, rank: int, label: str) -> Iterator[None]:
        """In the block, failing to map memory of group rank ``rank`` is ``PeerLost`` if that rank is gone."""
        try:
            yield
        except OSError as error:
            if self.peers.table[rank].rank in self.peers.confirm() or self.shared.state(rank) != HERE:
                raise gone(self.shared, self.peers, rank, label) from error
            raise


class Arrival:
    """Waits until words of other ranks reach their targets: of all of them, or of ``any_of`` them.

    ``awaited[rank]`` are words, index and target, of a group rank. ``cancelled()`` ends the wait early,
    without an error. It has the interface of a backend's work, for ``Peers.wait``.
    """

    def __init__(
        self,
        shared: GroupSegment,
        peers: Peers,
        awaited: Mapping[int, tuple[Words, int, int]],
        label: str,
        *,
        any_of: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shared, self._peers, self._awaited, self._label = shared, peers, awaited, label
        self._any, self._cancelled = any_of, cancelled
        self._lost: PeerLost | None = None

    def wait_by_deadline(self, timeout_s: float | None = None) -> None:
        """Wait; ``PeerLost`` names the ranks that are gone, or that did not come within ``timeout_s``."""
        self._peers.wait(self, self._label, missing=self.missing, timeout_s=timeout_s)

    def missing(self) -> list[int]:
        """The group ranks that have not come and still can."""
        return sorted(rank for rank in self._late() if self._shared.state(rank) != LEFT)

    def is_completed(self) -> bool:
        """Whether waiting is over, successfully or not."""
        return self._lost is not None or not self._late() or self._cancelled()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Sleep until the words are there; ``TimeoutError`` after ``timeout``."""
        until = time.monotonic() + timeout.total_seconds()
        while self._lost is None and (late := self._late()) and not self._cancelled():
            lost = [rank for rank in late if self._shared.state(rank) != HERE]
            if lost and (not self._any or lost == late):
                # A rank may have come, then left, after it was found late.
                if lost[0] in self._late():
                    self._lost = gone(self._shared, self._peers, lost[0], self._label)
                continue
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._sleep([rank for rank in late if rank not in lost], left_s)
        if self._lost is not None:
            raise self._lost
        return True

    def _late(self) -> list[int]:
        late = [rank for rank, (words, word, target) in self._awaited.items() if words[word] < target]
        return [] if self._any and len(late) < len(self._awaited) else late

    def _sleep(self, ranks: Sequence[int], seconds: float) -> None:
        words, word, target = self._awaited[ranks[0]]
        if words is self._shared.words and word == self._shared.posted[ranks[0]]:
            self._shared.core.await_round(self._shared.view, target, int(seconds * _NS))
        else:
            words.sleep(word, target, min(seconds, ANY_SLICE_S) if len(ranks) > 1 else seconds)


def gone(shared: GroupSegment, peers: Peers, rank: int, label: str) -> PeerLost:
    """The error of operation ``label`` when group rank ``rank`` has announced that it will not come.

    If another rank was killed, that one is named instead: it could announce nothing, and is the cause.
    """
    where = f"rank {peers.me.rank} waited in {label} for rank {peers.table[rank].rank}"
    dead = peers.dead()
    killed = [peer for r, peer in enumerate(peers.table) if peer.rank in dead and shared.state(r) == HERE]
    if killed:
        names, ranks = ", ".join(map(describe, killed)), [peer.rank for peer in killed]
        return PeerLost(f"{names} died: {where}", ranks=ranks, operation=label)
    how = f"failed: {shared.reason(rank)}"
    if shared.state(rank) == LEFT:
        how = (
            "left the group. If it raised, the cause stands in its own traceback; if it ended without an "
            "error, give every rank the same number of calls"
        )
    return PeerLost(f"{where}, which {how}", ranks=[peers.table[rank].rank], operation=label)
