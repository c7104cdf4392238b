"""The other ranks of a group: their processes, and ``Peers.wait``, which waits for an operation of the group.

Only a deadline finds a rank that never arrives, but a dead rank can be found at once. So a wait is cut into
slices. Between two slices it checks the processes of this host by id and start time (the kernel may have
reused the id), and it ends at the deadline. It alone turns a backend's error into ``PeerLost``: gloo's
message when a neighbour leaves ("Connection closed by peer") names an address, not a cause. It learns about
other ranks from the kernel's process states, from their debug servers, and on other hosts from the status
store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from instep.errors import PeerLost
from instep.launch.process_state import look
from instep.net import device
from instep.net.hang_report import (
    AFTER,
    IN,
    LATEST,
    LEFT,
    FlightRecorder,
    Problem,
    StatusRow,
    ask_peers,
    publish_flight,
    status_table,
    words_of,
)
from instep.net.lane import Handle
from instep.net.store import StatusStore

SLICE_S = 0.05  # within which a death is noticed
POST_S = 5.0  # a wait of this length, or of a quarter of its deadline, is posted for other hosts
LOOK_S = 1.0  # a wait of this length asks whether a rank has failed, and again when it has doubled
RECORD_BYTES = 256
# A rank that a signal has stopped may be continued; but a run that nobody knows to be stopped is worse.
STOPPED_S = 5.0
# A closed connection is seen before the kernel has finished the peer's exit.
CONFIRM_S = 1.0
ALMOST_S = 0.05  # ranks whose waits began that close together began at the same time
NUM_NAMED = 4  # in one sentence
STATES = {"": "gone", "R": "running", "S": "sleeping", "I": "sleeping", "D": "disk", "T": "stopped"}


@dataclass(frozen=True)
class Peer:
    """One rank's process: enough to tell it from every other process of its host."""

    rank: int
    host: str
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat; 0 where there is no /proc
    pid_space: int = 0  # its pid namespace: containers may share the name of their host, but not its ids
    gpu: int = 0  # a number that no other GPU has (``device.current_gpu``); 0: it computes on a CPU
    token: int = 0  # random: the first rank's names the exchange of records that a group's peers come from

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
        numbers = (int(fields[name]) for name in ("pid", "start_time", "pid_space", "gpu", "token"))
        return Peer(int(fields["rank"]), str(fields["host"]), *numbers)


def own_peer(rank: int) -> Peer:
    """This process as ``rank``."""
    host, pid, gpu = socket.gethostname()[:64], os.getpid(), device.current_gpu()
    return Peer(rank, host, pid, _start_time(pid) or 0, _pid_space(), gpu, secrets.randbits(32))


def statuses_of(pids: Mapping[int, int]) -> list[StatusRow]:
    """The status of ranks of this host, each on the group that it used last; ``pids`` are their processes.

    Takes half a second where one of them gives no answer, though it is not stopped.
    """
    me = own_peer(0)
    peers = [replace(me, rank=rank, pid=pid, start_time=_start_time(pid) or 0) for rank, pid in pids.items()]
    states = {peer.rank: _state(peer) for peer in peers}
    answers = ask_peers((peer for peer in peers if states[peer.rank] not in ("gone", "stopped")), LATEST)
    return [replace(answers.get(rank) or StatusRow(rank), rank=rank, state=states[rank]) for rank in pids]


def is_stopped(pid: int) -> bool:
    """Whether the kernel does not run process ``pid``: SIGSTOP, or a debugger."""
    found = look(pid)
    return found is not None and found[0] in "Tt"


def _letter(peer: Peer) -> str:
    """The kernel's letter for the state of a process of this host; "" if it is gone."""
    found = look(peer.pid)
    return found[0] if found and found[1] == peer.start_time else ""


def _state(peer: Peer) -> str:
    letter = _letter(peer).upper()  # "t": a debugger's stop
    return STATES.get(letter, letter)


def _start_time(pid: int) -> int | None:
    """The start of process ``pid``, or None if it is gone or a zombie."""
    found = look(pid)
    return found[1] if found else None


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Peers:
    """The processes of a group's ranks; entry i of the table belongs to the i-th rank of the group.

    ``flight`` records what this rank does on the group; ranks of this host may ask for it by the table and
    ``name``, which is the same on all ranks and differs between groups with the same table. ``outer`` are the
    peers of the group that this one is the local part of.
    """

    def __init__(
        self,
        table: Sequence[Peer],
        me: Peer,
        timeout_s: float,
        status_store: StatusStore | None = None,
        flight: FlightRecorder | None = None,
        name: str = "",
    ) -> None:
        self.table = tuple(table)
        self.me = me
        self.timeout_s = timeout_s
        self.flight = flight or FlightRecorder(me.rank)
        self.outer: Peers | None = None
        self.given_up = False  # set by another thread to end the current wait
        self._near = [peer for peer in self.table if _is_near(peer, me)]
        # Ranks of this host are asked, so without others nothing has to be posted.
        is_spread = len(self._near) < len(self.table)
        self.status_store = status_store if status_store is not None and is_spread else StatusStore()
        self._group = f"{self.table[0].token} {name}"
        if len(self.table) > 1:
            publish_flight(self.flight, me, self._group)

    def dead(self) -> list[int]:
        """Global ranks on this host whose process is gone. Ranks of other hosts cannot be seen from here."""
        return [peer.rank for peer in self._near if not _letter(peer)]

    def wait(
        self,
        work: device.Waitable,
        operation: str,
        *,
        on_gpu: bool = False,
        missing: Callable[[], Collection[int]] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Block until ``work`` is done.

        ``missing()`` returns the table positions of the ranks that have not arrived, if the backend knows
        them: a rank that arrived and then exited is not lost.

        Raises:
            PeerLost: a rank died, has been stopped by a signal for ``STOPPED_S``, the backend failed, or
                ``timeout_s`` (by default the table's) passed.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        began = looked = time.monotonic()
        look_s, posted, doubted = LOOK_S, False, False
        stopped_s: dict[int, float] = {}
        try:
            while not self._is_done(work, operation, began, limit_s, on_gpu):
                # Time in which this process was suspended does not count: peers may have arrived since.
                passed_s = time.monotonic() - looked
                began += max(passed_s - 2 * SLICE_S, 0.0)
                waited_s = time.monotonic() - began
                self.flight.waiting_in = operation, int(began * 1e9)
                if self.given_up:
                    raise PeerLost(f"rank {self.me.rank} gave up {operation}", operation=operation)
                letters = {peer.rank: _letter(peer) for peer in self._near}
                absent = None if missing is None else [self.table[i] for i in missing()]
                if absent is not None:  # read after the letters: what a dead rank has done is final
                    letters = {peer.rank: letters[peer.rank] for peer in absent if peer.rank in letters}
                # A debugger's stop has another letter, and does not count.
                stopped_s = {
                    rank: stopped_s.get(rank, 0.0) + min(passed_s, 2 * SLICE_S)
                    for rank, letter in letters.items()
                    if letter == "T"
                }
                if max(stopped_s.values(), default=0.0) > STOPPED_S:
                    raise self._stopped(operation, waited_s, stopped_s)
                dead = [rank for rank, letter in letters.items() if not letter]
                if dead and (doubted or absent is not None):
                    raise self._died(operation, waited_s, dead)
                doubted = bool(dead)  # it may have finished; its data may still be on the way
                if waited_s > limit_s and absent != [] and not dead:
                    raise self._late(operation, waited_s, limit_s, absent)
                if not posted and waited_s >= min(POST_S, limit_s / 4):
                    self._post()
                    posted = True
                if waited_s >= look_s and absent is None:
                    look_s = 2 * waited_s
                    self._look(operation, waited_s)
                looked = time.monotonic()
        finally:
            self.flight.waiting_in = None
        if posted:
            self.status_store.post(replace(self.flight.row(), status=AFTER))

    def _is_done(
        self, work: device.Waitable, operation: str, began: float, limit_s: float, on_gpu: bool
    ) -> bool:
        """Wait for a slice."""
        left_s = began + limit_s - time.monotonic()
        try:
            return device.done_within(work, max(min(SLICE_S, left_s), 0.001), on_gpu=on_gpu)
        except PeerLost:
            raise
        except RuntimeError as error:
            if isinstance(work, Handle) and work.failed_here:
                raise
            waited_s = time.monotonic() - began
            if dead := self.confirm():
                raise self._died(operation, waited_s, dead) from None
            said = f"a rank left {operation}: {self._where(operation, waited_s)}, then the backend said: "
            cause = ". The cause stands in the traceback of a rank that has another error than PeerLost"
            # ``from None``: the backend's message is included, and its C++ stack would only hide it.
            raise PeerLost(said + words_of(error) + cause, operation=operation) from None

    def _look(self, operation: str, waited_s: float) -> None:
        """Raise ``PeerLost`` if a rank has failed: gloo does not end every wait for it.

        It leaves out messages that are queued, or partly written or read (``Pair::signalException``,
        gloo/transport/tcp/pair.cc).
        """
        rows = ask_peers(self._near, self._group)
        lost, dead = self.status_store.lost()
        if dead:
            raise self._died(operation, waited_s, lost)
        if lost := lost or [rank for rank, row in rows.items() if row.status == LEFT]:
            raise PeerLost(
                f"{self._named(lost)} left {operation}: {self._where(operation, waited_s)}. Look for the "
                "cause in its own traceback",
                ranks=lost,
                operation=operation,
            )

    def _post(self) -> None:
        """Post the status of all ranks of this host; a late rank does not post its own."""
        if self.outer is not None:  # a wait inside of a host belongs to an operation of all hosts
            self.outer._post()
        elif len(self._near) < len(self.table):
            for row in ask_peers(self._near, self._group).values():
                self.status_store.post(row)

    def rows(self) -> list[StatusRow]:
        """The status of every rank, in the order of the table.

        Ranks of this host are asked, which takes half a second where one gives no answer; of the others it is
        what was posted last.
        """
        rows = ask_peers(self._near, self._group)
        rows[self.me.rank] = self.flight.row()
        found = [rows.get(p.rank) or self.status_store.read(p.rank) or StatusRow(p.rank) for p in self.table]
        return [
            replace(row, rank=peer.rank, state=_state(peer) if peer in self._near else "elsewhere")
            for peer, row in zip(self.table, found, strict=True)
        ]

    def _where(self, operation: str, waited_s: float) -> str:
        return f"rank {self.me.rank} waited {waited_s:.1f} s in {operation}"

    def _named(self, ranks: Collection[int]) -> str:
        return _listed([describe(peer) for peer in self.table if peer.rank in ranks], ", ")

    def _died(self, operation: str, waited_s: float, dead: Sequence[int]) -> PeerLost:
        self.status_store.report_lost(dead, dead=True)
        return PeerLost(
            f"{self._named(dead)} died: {self._where(operation, waited_s)}. If it raised, the cause stands "
            "in its own traceback; if it ended without an error, it had fewer batches or left the loop "
            "early: give every rank the same number, or use model.micro_batches(G)",
            ranks=dead,
            operation=operation,
        )

    def _stopped(self, operation: str, waited_s: float, stopped: Mapping[int, float]) -> PeerLost:
        """``stopped`` are ranks, and for how many seconds each has been stopped."""
        peers = [peer for peer in self.table if peer.rank in stopped]
        names = _listed([f"{describe(peer)} for {stopped[peer.rank]:.1f} s" for peer in peers], ", ")
        ids = " ".join(str(peer.pid) for peer in peers)
        return PeerLost(
            f"stopped by a signal: {names}: {self._where(operation, waited_s)}. Continue a stopped rank "
            f"within {STOPPED_S:g} s (kill -CONT), or end it (kill -KILL {ids})",
            ranks=list(stopped),
            operation=operation,
        )

    def _late(
        self, operation: str, waited_s: float, limit_s: float, absent: Sequence[Peer] | None
    ) -> PeerLost:
        """The error of a deadline, which one of the ranks that wait shows with the table of all ranks."""
        rows, number = self.rows(), self.flight.number
        if absent is None:
            came = {
                row.rank
                for row in rows
                if row.number > number or (row.number == number and row.operation == operation)
            }
            absent = [peer for peer in self.table if peer.rank not in came | {self.me.rank}]
        ranks, by_rank = [peer.rank for peer in absent], {row.rank: row for row in rows}
        names = _listed([f"{describe(peer)}, {_status(by_rank[peer.rank])}" for peer in absent], "; ")
        problem = Problem(
            f"{self._where(operation, waited_s)}, and never came: {names or 'some rank'}",
            f"{_listed([f'rank {rank}' for rank in ranks], ', ') or 'some rank'} never came to {operation}",
            "Look there for other code, fewer steps or something that blocks, or raise timeout_s "
            f"({limit_s:g} s)",
        )
        # The one with the earliest deadline, which raises first; of several at once the lowest.
        waits = {
            row.rank: row.since
            for row in rows
            if row.since and (row.status, row.operation, row.number) == (IN, operation, number)
        }
        waits.setdefault(self.me.rank, by_rank[self.me.rank].since)
        first = min(rank for rank, since in waits.items() if since <= min(waits.values()) + ALMOST_S)
        shown = first == self.me.rank
        text = problem.around(status_table(rows, ranks)) if shown else problem.beside(first)
        return PeerLost(text, ranks=ranks, operation=operation)

    def confirm(self) -> list[int]:
        """Dead ranks, after a moment in which a peer that has just hung up may exit, or be reported."""
        until = time.monotonic() + CONFIRM_S
        while not (dead := self.dead() or self._reported_dead()) and time.monotonic() < until:
            time.sleep(0.02)
        return dead

    def _reported_dead(self) -> list[int]:
        lost, dead = self.status_store.lost()
        return lost if dead else []


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
    """Whether the process of ``peer`` still runs; None if it cannot be seen from here."""
    return _start_time(peer.pid) == peer.start_time if _is_near(peer, own_peer(peer.rank)) else None


def _is_near(peer: Peer, here: Peer) -> bool:
    """Whether the process of ``peer`` can be seen from that of ``here``."""
    return (peer.host, peer.pid_space) == (here.host, here.pid_space) and bool(peer.start_time)
