"""Rounds: every rank writes, every rank comes, every rank reads; all collectives are made of these.

In round k a rank fills its half number k % 2, counts itself in, waits until all have, and reads what it needs
from the halves of the others. Two halves make one wait per round enough: who comes to round k + 1 has read
all of round k, so when round k + 1 is complete, half k % 2 is free again.

    rank 0   fill half 1 | post 1 . . . wait | read halves 1, fill half 0 | post 2 . . wait | read ...
    rank 1   fill half 1 . . . . | post 1    | read halves 1, fill half 0 . . . | post 2    | read ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.mesh.hang_report import FlightRecorder, Problem, StatusRow
from instep.mesh.peers import Peer, Peers, describe
from instep.native.library import DIFFERENT, MISSING, SHARED, THERE
from instep.shm.call import CALL_BYTES, NOWHERE, Call, Location, disagreement
from instep.shm.futex import Words
from instep.shm.group_segment import HERE, LEFT, GroupSegment

# Longer than two awake ranks need for a round (2 us), shorter than it takes to fall asleep and wake (17 us).
SPIN_S = 15e-6
NOTES_S = 1.0  # for ranks that are all there
SLICE_S = 0.02  # asleep in the native core, before liveness and deadlines are looked after
_NS = 1_000_000_000
_NOWHERE = NOWHERE.to_bytes()


class Rounds:
    """A group's rounds, as its group rank ``shared.rank`` goes through them; one thread at a time.

    Raises, from everything that waits: ``PeerLost``, if a rank is gone, has left the group or does not come.
    """

    def __init__(
        self,
        shared: GroupSegment,
        table: Sequence[Peer],
        timeout_s: float,
        num_cores: int,
        flight: FlightRecorder | None = None,
    ) -> None:
        self.shared = shared
        self.rank = shared.rank
        self.size = shared.size
        self.ranks = [peer.rank for peer in table]
        self.peers = Peers(table, table[shared.rank], timeout_s, flight=flight)
        self.flight = self.peers.flight
        self.number = shared.words[shared.posted[shared.rank]]  # rounds so far
        shared.view.spin_ns, shared.view.yields = int(SPIN_S * _NS), shared.size > num_cores
        self.reduction = shared.reduction()
        # Each begins with its neighbour, so that not all sleep on one word.
        self._others = [(shared.rank + i) % shared.size for i in range(1, shared.size)]

    def mine(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        """This rank's half for the round that comes, ``HALF_BYTES`` in all."""
        return self.shared.halves(dtype)[self.rank][(self.number + 1) & 1]

    def theirs(self, rank: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The half of group rank ``rank`` in the round that has just been met; not to be written to."""
        return self.shared.halves(dtype)[rank][self.number & 1]

    def everyones(self) -> Tensor:
        """The halves of all ranks in the round that has just been met, (W, HALF_BYTES); for reading."""
        return self.shared.all_halves(self.number)

    def meet(self, label: str, timeout_s: float | None = None) -> None:
        """Come to the next round and wait for all others; ``label`` names the operation in errors."""
        shared = self.shared
        self.number += 1
        if shared.core.come(shared.view, self.number) and shared.core.meet(
            shared.view, self.number, self.slice_ns(timeout_s)
        ):
            self.await_all(label, timeout_s)

    def slice_ns(self, timeout_s: float | None) -> int:
        """How long the native core may sleep, which looks after nothing."""
        return int(min(SLICE_S, self.peers.timeout_s if timeout_s is None else timeout_s) * _NS)

    def await_all(self, label: str, timeout_s: float | None = None, number: int | None = None) -> None:
        """Wait until all others have come to round ``number``, by default to the one that this rank is in."""
        target = self.number if number is None else number
        awaited = {other: self.shared.posted[other] for other in self._others}
        arrival = Arrival(self.shared, self.peers, self.shared.words, awaited, target, label)
        self.peers.wait(arrival, label, missing=arrival.missing, timeout_s=timeout_s)

    def agree(
        self, call: Call, label: str, location: Location = NOWHERE, timeout_s: float | None = None
    ) -> list[Location]:
        """The first round of an operation: compare calls, and tell each other where the tensors lie.

        Raises:
            Desync: the calls differ; raised on every rank alike.
        """
        self._announce(call, label, location)
        self.meet(label, timeout_s)
        return self._compare(label)

    def publish(self, write: Callable[[Tensor], object], call: Call, label: str) -> Tensor:
        """``write(half)`` fills this rank's half; the halves of all ranks, (W, HALF_BYTES). One round.

        They stay until this rank comes to the operation after the next one; none but its rank writes there.

        Raises:
            Desync: the calls differ; raised on every rank alike.
        """
        shared, announcement = self.shared, call.announcement
        self._announce(call, label, NOWHERE)
        write(self.mine())
        self.meet(label)
        for other in self._others:
            if shared.slot(other, self.number) != announcement:
                self._compare(label)
        return shared.all_halves(self.number)

    def reduce(self, call: Call, label: str, timeout_s: float | None = None) -> bool:
        """The all-reduce ``self.reduction`` by the core, which is to ``compare`` calls or is past that.

        False: only the calls were compared, because a rank has its tensor in shared memory.

        Raises:
            Desync: as ``agree``.
        """
        reduction = self.reduction
        reduction.rounds, reduction.at, reduction.stage = self.number, 0, 0
        if reduction.compare:
            self._announce(call, label, NOWHERE)
        sleep_ns = self.slice_ns(timeout_s)
        while (found := self.shared.core.all_reduce(reduction, sleep_ns)) == MISSING:
            self.await_all(label, timeout_s, reduction.rounds + reduction.at + 1)
        self.number = reduction.rounds
        if found == DIFFERENT:
            self._compare(label)
        if found not in (THERE, SHARED):
            raise RuntimeError(f"{label}: the native core refused the reduction (code {found})")
        return bool(found == THERE)

    def _announce(self, call: Call, label: str, location: Location) -> None:
        """Write down what this rank is about to do."""
        self.flight.begin(label, call)
        self.shared.name(label, self.flight.number)
        data = call.announcement if location is NOWHERE else call.to_bytes() + location.to_bytes()
        self.shared.write_slot(self.number + 1, data)

    def _compare(self, label: str) -> list[Location]:
        """What all have announced in the round that has just been met, which must be the same call."""
        slots = [self.shared.slot(rank, self.number) for rank in range(self.size)]
        mine = slots[self.rank][:CALL_BYTES]
        if any(slot[:CALL_BYTES] != mine for slot in slots):
            calls = [Call.from_bytes(slot) for slot in slots]
            raise self._out_of_step(disagreement(calls, self.ranks), label)
        told = [slot[CALL_BYTES:] for slot in slots]
        return [NOWHERE if place == _NOWHERE else Location.from_bytes(place) for place in told]

    def _out_of_step(self, problem: Problem, label: str) -> Desync:
        """As ``Group.out_of_step``: the ranks have all found that they disagree, and all come here."""
        self.shared.write_row(replace(self.flight.row(), stack=()).to_bytes())
        with suppress(PeerLost, ValueError):  # then what they disagree about has to do
            self.meet(label, NOTES_S)
            rows = [StatusRow.from_bytes(self.shared.row(rank)) for rank in range(self.size)]
            return problem.as_desync(rows, self.rank)
        return Desync(str(problem))


class Arrival:
    """Words of other ranks reaching ``target``, in the form of a backend's work.

    ``awaited[rank]`` is the word of a group rank. ``cancelled()`` ends the waiting early, and well.
    """

    def __init__(
        self,
        shared: GroupSegment,
        peers: Peers,
        words: Words,
        awaited: Mapping[int, int],
        target: int,
        label: str,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shared = shared
        self._peers = peers
        self._words = words
        self._awaited = awaited
        self._target = target
        self._label = label
        self._cancelled = cancelled
        self._lost: PeerLost | None = None

    def missing(self) -> list[int]:
        """The group ranks that have not come."""
        return sorted(rank for rank, word in self._awaited.items() if self._words[word] < self._target)

    def is_completed(self) -> bool:
        """Whether waiting is over, one way or the other."""
        return self._lost is not None or not self.missing() or self._cancelled()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Sleep until all have come; ``TimeoutError`` after a while."""
        if self._lost is not None:
            raise self._lost
        until = time.monotonic() + timeout.total_seconds()
        while (missing := self.missing()) and not self._cancelled():
            for rank in missing:
                if self._shared.state(rank) != HERE and rank in self.missing():
                    self._lost = gone(self._shared, self._peers, rank, self._label)
                    raise self._lost
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sleep(missing[0], left_s)
        return True

    def _sleep(self, rank: int, seconds: float) -> None:
        """Until the word of ``rank`` changes, or for other reasons."""
        word = self._awaited[rank]
        if word == self._shared.posted[rank] and self._words is self._shared.words:
            self._shared.core.meet(self._shared.view, self._target, int(seconds * _NS))
        else:
            self._words.sleep(word, self._target, seconds)


def gone(shared: GroupSegment, peers: Peers, rank: int, label: str) -> PeerLost:
    """What to raise in ``label`` when group rank ``rank`` will not come any more, as it says itself.

    A rank that was killed could say nothing, and is named in its place: it failed because of that one.
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


@contextmanager
def reaching(shared: GroupSegment, peers: Peers, rank: int, label: str) -> Iterator[None]:
    """The block maps memory of group rank ``rank``; if that is gone because the rank is, ``PeerLost``."""
    try:
        yield
    except OSError as error:
        if peers.table[rank].rank in peers.confirm() or shared.state(rank) != HERE:
            raise gone(shared, peers, rank, label) from error
        raise
