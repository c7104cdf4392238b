"""The other ranks: their processes, whether they live, what they do, and the one wait that all are made of.

A rank that never comes can only be found by a deadline; one that died can be found at once, by a rank that
looks. Every wait of instep is therefore cut into slices: between two slices the awaited ranks of this
host are checked by process id and start time (an id alone may belong to a stranger by now), and at the
end stands the deadline. The wait also is the only place that turns a backend's error into ``PeerLost``:
what gloo reports when a neighbour leaves ("Connection closed by peer") names an address, not a cause.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from instep.errors import PeerLost
from instep.mesh import debug_server, device
from instep.mesh.debug_server import StatusStore
from instep.mesh.hang_report import (
    AFTER,
    FAILED,
    IN,
    FlightRecorder,
    Problem,
    StatusRow,
    status_table,
    words_of,
)
from instep.mesh.process_state import look
from instep.mesh.store_client import patience_s
from instep.work import Handle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SLICE_S = 0.05  # within which a death is noticed
POST_S = 0.2  # a wait that lasts as long is told the others
LOOK_S = 1.0  # one that lasts as long looks at its connections, and again when it has lasted twice as long
RECORD_BYTES = 256
# A rank that a signal has stopped may be continued; a run of which nobody knows that it stands is the worse.
STOPPED_S = 5.0
# A closed connection is seen before the kernel has finished the peer's exit.
CONFIRM_S = 1.0
AT_ONCE_S = 0.05  # between ranks that wait for the same one
NUM_NAMED = 4  # in one sentence
STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "disk", "T": "stopped", "t": "stopped"}


@dataclass(frozen=True)
class Peer:
    """One rank's process: enough to tell it from every other process of its host."""

    rank: int
    host: str
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat; 0 where there is no /proc
    pid_space: int = 0  # its pid namespace: containers may share the name of their host, but not its ids
    flight: int = 0  # the number of its recorder in its debug server; 0: it has none
    gpu: int = 0  # a number that no other GPU has (``device.current_gpu``); 0: it computes on a CPU

    def to_bytes(self) -> bytes:
        """A record of ``RECORD_BYTES`` bytes, padded with spaces."""
        record = json.dumps(asdict(self)).encode()
        if len(record) > RECORD_BYTES:
            raise ValueError(
                f"host name of rank {self.rank} is too long: {len(record)} of {RECORD_BYTES} bytes"
            )
        return record.ljust(RECORD_BYTES)

    @staticmethod
    def from_bytes(record: bytes) -> Peer:
        """The peer that ``to_bytes`` wrote."""
        fields = json.loads(record[:RECORD_BYTES])
        numbers = (int(fields[name]) for name in ("pid", "start_time", "pid_space", "flight", "gpu"))
        return Peer(int(fields["rank"]), str(fields["host"]), *numbers)


def own_peer(rank: int, flight: FlightRecorder | None = None) -> Peer:
    """This process as ``rank``, whose peers may ask for ``flight``."""
    pid = os.getpid()
    host, gpu = socket.gethostname()[:128], device.current_gpu()
    me = Peer(rank, host, pid, _start_time(pid) or 0, _pid_space(), gpu=gpu)
    return me if flight is None else replace(me, flight=debug_server.register(flight, me))


def statuses_of(pids: Mapping[int, int]) -> list[StatusRow]:
    """The status of ranks of this host, each on the group that it used last; ``pids`` are their processes.

    Takes half a second where one of them gives no answer, though it is not stopped.
    """
    me, seen = own_peer(0), {rank: look(pid) for rank, pid in pids.items()}
    found = {rank: (STATES.get(now[0], now[0]), now[1]) for rank, now in seen.items() if now}
    peers = [
        replace(me, rank=rank, pid=pids[rank], start_time=start_time, flight=debug_server.LATEST)
        for rank, (state, start_time) in found.items()
        if state != "stopped"
    ]
    answers = debug_server.ask(peers)
    states = {rank: found[rank][0] if rank in found else "gone" for rank in pids}
    return [replace(answers.get(rank) or StatusRow(rank), rank=rank, state=states[rank]) for rank in pids]


def is_stopped(pid: int) -> bool:
    """Whether the kernel does not run process ``pid``: SIGSTOP, or a debugger."""
    found = look(pid)
    return found is not None and STATES.get(found[0]) == "stopped"


def _start_time(pid: int) -> int | None:
    """When process ``pid`` began, or None if it is gone or a zombie."""
    found = look(pid)
    return found[1] if found else None


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Peers:
    """The processes of a group's ranks; entry i of the table belongs to the i-th rank of the group.

    ``flight`` records what this rank does on the group; ranks of other hosts read it in ``status_store``.
    """

    def __init__(
        self,
        table: Sequence[Peer],
        me: Peer,
        timeout_s: float,
        status_store: StatusStore,
        flight: FlightRecorder | None = None,
    ) -> None:
        self.table = tuple(table)
        self.me = me
        self.status_store = status_store
        self.timeout_s = timeout_s
        self.flight = flight or FlightRecorder(me.rank)
        self.given_up = False  # set by another thread to end the wait that is under way
        self._near = [peer for peer in self.table if _is_near(peer, me)]

    @property
    def timeout_s(self) -> float:
        """The deadline of a wait, from which that of every look into the status store follows."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        self.status_store.client.patience_s = patience_s(seconds)

    def dead(self) -> list[int]:
        """Global ranks on this host whose process is gone. Ranks of other hosts cannot be seen from here."""
        return _gone(self._seen())

    def _told_dead(self) -> list[int]:
        """Global ranks that those of their host have found dead, as they have told in the store."""
        lost, dead = self.status_store.lost() if len(self._near) < len(self.table) else ([], False)
        return lost if dead else []

    def _seen(self) -> dict[int, str]:
        """The kernel's letter for the state of each rank of this host; "" of one that is gone."""
        seen = {peer.rank: (look(peer.pid), peer) for peer in self._near}
        return {
            rank: now[0] if now and now[1] == peer.start_time else "" for rank, (now, peer) in seen.items()
        }

    def wait(
        self,
        work: device.Waitable,
        operation: str,
        *,
        on_gpu: bool = False,
        over: Iterable[ProcessGroup | None] = (),
        missing: Callable[[], Collection[int]] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Block until ``work`` is done, over the connections of gloo that ``over`` has.

        ``missing()`` are the places in the table of the ranks that have not come, where that is known: then a
        rank that came and ended is not a lost one.

        Raises:
            PeerLost: a rank died, has been stopped by a signal for ``STOPPED_S``, the backend failed, or
                ``timeout_s`` (by default the table's) passed.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            self._wait(work, operation, limit_s, on_gpu, over, missing)
        finally:
            self.flight.waited()

    def _wait(
        self,
        work: device.Waitable,
        operation: str,
        limit_s: float,
        on_gpu: bool,
        over: Iterable[ProcessGroup | None],
        missing: Callable[[], Collection[int]] | None,
    ) -> None:
        began, look_s = time.monotonic(), LOOK_S
        posted = relayed = doubted = False
        stops = _StopClock()
        while True:
            sliced = time.monotonic()
            if self._slice(work, operation, began, limit_s, on_gpu):
                break
            # As long as this process does not run, nobody is late: what has come waits to be read.
            began += max(time.monotonic() - sliced - 2 * SLICE_S, 0.0)
            if self.given_up:
                raise PeerLost(f"rank {self.me.rank} gave up {operation}", operation=operation)
            seen = self._seen()
            absent = None if missing is None else [self.table[i] for i in missing()]
            if absent is not None:  # asked after their processes: what a dead rank has done is final
                seen = {peer.rank: seen[peer.rank] for peer in absent if peer.rank in seen}
            dead = _gone(seen)
            if stopped := stops.longer_than(STOPPED_S, seen):
                raise self._stopped(operation, time.monotonic() - began, stopped)
            if dead and absent is None and not doubted:
                doubted = True  # it may have ended well, and what it has sent comes over others still
                continue
            waited_s = time.monotonic() - began
            if dead or (waited_s > limit_s and absent != []):
                raise self._lost(operation, waited_s, limit_s, None, dead, absent)
            if not posted and waited_s >= POST_S:
                self.flight.waits(operation, int(began * 1e9))
                self.status_store.post(self.flight.row())
                posted = True
            if not relayed and waited_s > limit_s / 2:
                self._relay()
                relayed = True
            if waited_s >= look_s:
                look_s = 2 * waited_s
                self._look(over, operation, waited_s, limit_s)
        if posted:
            self.status_store.post(replace(self.flight.row(), status=AFTER))

    def _look(
        self, over: Iterable[ProcessGroup | None], operation: str, waited_s: float, limit_s: float
    ) -> None:
        """Raise ``PeerLost`` if a connection has ended, and a rank has failed: gloo may not have told.

        One that has ended well owes nothing, and may have hung up.
        """
        try:
            device.require_connected(over)
        except RuntimeError as error:
            if self.status_store.lost()[0] or any(row.status == FAILED for row in self.rows()):
                raise self._lost(operation, waited_s, limit_s, error, self.confirm(), None) from None

    def _relay(self) -> None:
        """Post what the ranks of this host do, some of which may not know that they are missed."""
        if len(self._near) < len(self.table):
            for row in debug_server.ask(peer for peer in self._near if peer.rank != self.me.rank).values():
                self.status_store.post(row)

    def _slice(
        self, work: device.Waitable, operation: str, began: float, limit_s: float, on_gpu: bool
    ) -> bool:
        left_s = began + limit_s - time.monotonic()
        try:
            return device.done_within(work, max(min(SLICE_S, left_s), 0.001), on_gpu=on_gpu)
        except PeerLost:
            raise
        except RuntimeError as error:
            if isinstance(work, Handle) and work.failed_here:
                raise
            waited_s = time.monotonic() - began
            # What the backend says is in there, and its stack of C++ would only hide it.
            raise self._lost(operation, waited_s, limit_s, error, self.confirm(), None) from None

    def rows(self) -> list[StatusRow]:
        """The status of every rank, in the order of the table.

        Ranks of this host are asked, which takes half a second where one gives no answer; of the others there
        is what they have posted.
        """
        answers = debug_server.ask(peer for peer in self._near if peer.rank != self.me.rank)
        answers[self.me.rank] = self.flight.row()
        rows = [
            answers.get(p.rank) or self.status_store.read(p.rank) or StatusRow(p.rank) for p in self.table
        ]
        return [
            replace(row, rank=peer.rank, state=self._state(peer))
            for peer, row in zip(self.table, rows, strict=True)
        ]

    def _state(self, peer: Peer) -> str:
        if peer not in self._near:
            return "elsewhere"
        found = look(peer.pid)
        return STATES.get(found[0], found[0]) if found and found[1] == peer.start_time else "gone"

    def _lost(
        self,
        operation: str,
        waited_s: float,
        limit_s: float,
        error: Exception | None,
        dead: Sequence[int],
        absent: Sequence[Peer] | None,
    ) -> PeerLost:
        """The error to raise; ``error`` is what the backend said, None if it said nothing."""
        where = f"rank {self.me.rank} waited {waited_s:.1f} s in {operation}"
        if dead:
            if len(self._near) < len(self.table):
                self.status_store.tell_lost(dead, dead=True)
            names = _listed([describe(peer) for peer in self.table if peer.rank in dead], ", ")
            return PeerLost(
                f"{names} died: {where}. If it raised, the cause stands in its own traceback; if it ended "
                "without an error, it had fewer batches or left the loop early: give every rank the same "
                "number, or use model.micro_batches(G)",
                ranks=dead,
                operation=operation,
            )
        if error is not None:
            return PeerLost(
                f"a rank left {operation}: {where}, then the backend said: {words_of(error)}. The cause "
                "stands in the traceback of a rank that has another error than PeerLost",
                operation=operation,
            )
        rows = self.rows()
        if absent is None:
            late = {row.rank for row in rows if not self._came(row, operation)}
            absent = [peer for peer in self.table if peer.rank in late and peer.rank != self.me.rank]
        ranks = [peer.rank for peer in absent]
        status = {row.rank: _status(row) for row in rows}
        names = _listed([f"{describe(peer)}, {status[peer.rank]}" for peer in absent], "; ") or "some rank"
        problem = Problem(
            f"{where}, and never came: {names}",
            f"{_listed([f'rank {rank}' for rank in ranks], ', ') or 'some rank'} never came to {operation}",
            "Look there for other code, fewer steps or something that blocks, or raise timeout_s "
            f"({limit_s:g} s)",
        )
        teller = self._teller(rows, operation)
        shown = teller == self.me.rank
        text = problem.around(status_table(rows, ranks)) if shown else problem.beside(teller)
        return PeerLost(text, ranks=ranks, operation=operation)

    def _teller(self, rows: Sequence[StatusRow], operation: str) -> int:
        """The rank that shows the table, of those that wait here as well: one whose deadline comes first.

        It raises before the others. Of those that have come almost at once it is the lowest.
        """
        mine = self.flight.row()
        came = {
            row.rank: row.since
            for row in rows
            if row.since and (row.status, row.operation, row.number) == (IN, operation, mine.number)
        }
        came.setdefault(self.me.rank, mine.since)
        first = min(came.values())
        return min(rank for rank, since in came.items() if since <= first + AT_ONCE_S)

    def _stopped(self, operation: str, waited_s: float, stopped: Mapping[int, float]) -> PeerLost:
        """The error to raise; ``stopped`` are ranks, and for how many seconds each has been."""
        peers = [peer for peer in self.table if peer.rank in stopped]
        names = [f"{describe(peer)} for {stopped[peer.rank]:.1f} s" for peer in peers]
        ids = " ".join(str(peer.pid) for peer in peers)
        return PeerLost(
            f"stopped by a signal: {_listed(names, ', ')}: rank {self.me.rank} waited {waited_s:.1f} s in "
            f"{operation}. Continue a stopped rank within {STOPPED_S:g} s (kill -CONT), or end it "
            f"(kill -KILL {ids})",
            ranks=list(stopped),
            operation=operation,
        )

    def _came(self, row: StatusRow, operation: str) -> bool:
        """Whether a rank has come to the operation that this one is in, or past it."""
        mine = self.flight.number
        return row.number > mine or (row.number == mine and row.operation == operation)

    def confirm(self) -> list[int]:
        """Dead ranks, giving a peer that has just hung up a moment to be gone, or to be told of."""
        until = time.monotonic() + CONFIRM_S
        while not (dead := self.dead() or self._told_dead()) and time.monotonic() < until:
            time.sleep(0.01)
        return dead


class _StopClock:
    """For how long ranks of this host have been stopped by a signal, in the time of one wait.

    Only time in which this process runs counts: a terminal stops all ranks of a job, and continues them one
    after the other. A debugger's stop has another letter, and is nobody else's business.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def longer_than(self, limit_s: float, seen: Mapping[int, str]) -> dict[int, float]:
        """Those that have been for ``limit_s``, and how long; ``seen`` are the letters of now, by rank."""
        before, self._looked = self._looked, time.monotonic()
        passed = min(self._looked - before, 2 * SLICE_S)
        self._seconds = {
            rank: self._seconds.get(rank, 0.0) + passed for rank, letter in seen.items() if letter == "T"
        }
        return {rank: seconds for rank, seconds in self._seconds.items() if seconds >= limit_s}


def _gone(seen: Mapping[int, str]) -> list[int]:
    return [rank for rank, letter in seen.items() if not letter]


def describe(peer: Peer) -> str:
    """``peer`` as errors name it."""
    return f"rank {peer.rank} (pid {peer.pid} on {peer.host})"


def _status(row: StatusRow) -> str:
    life = {"elsewhere": "on another host", "gone": "ended", "stopped": "stopped"}.get(row.state, "alive")
    if row.status:
        return f"{life}, {row.status} {row.operation}{f', at {row.site}' if row.site else ''}"
    return f"{life}, has not waited so far" if row.state == "elsewhere" else f"{life}, gives no answer"


def _listed(names: Sequence[str], between: str) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return between.join(names[:NUM_NAMED]) + more


def is_alive(peer: Peer) -> bool | None:
    """Whether the process of ``peer`` is still the one it was; None if it cannot be seen from here."""
    return _start_time(peer.pid) == peer.start_time if _is_near(peer, own_peer(peer.rank)) else None


def _is_near(peer: Peer, here: Peer) -> bool:
    """Whether the process of ``peer`` can be seen from that of ``here``."""
    return (peer.host, peer.pid_space) == (here.host, here.pid_space) and bool(peer.start_time)
