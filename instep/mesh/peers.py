"""Who the other ranks are, whether they live, and the one wait from which all waits are made.

A rank that never comes can only be found by a deadline; one that died can be found at once, if somebody
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from instep.errors import PeerLost
from instep.mesh import device
from instep.mesh.board import Board

SLICE_S = 0.2
RECORD_BYTES = 256
# A closed connection is seen before the kernel has finished the peer's exit.
CONFIRM_S = 1.0


@dataclass(frozen=True)
class Peer:
    """One rank's process: enough to tell it from every other process of its host."""

    rank: int
    host: str
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat; 0 where there is no /proc
    pid_space: int = 0  # its pid namespace: containers may share the name of their host, but not its ids

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
        numbers = (int(fields[name]) for name in ("pid", "start_time", "pid_space"))
        return Peer(int(fields["rank"]), str(fields["host"]), *numbers)


def myself(rank: int) -> Peer:
    """This process as ``rank``."""
    pid = os.getpid()
    return Peer(rank, socket.gethostname()[:128], pid, _start_time(pid) or 0, _pid_space())


def _start_time(pid: int) -> int | None:
    """When process ``pid`` began, or None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Peers:
    """The table of a group's ranks; entry i belongs to the i-th rank of the group."""

    def __init__(self, table: Sequence[Peer], me: Peer, timeout_s: float, board: Board) -> None:
        self.table = tuple(table)
        self.me = me
        self.timeout_s = timeout_s
        self.board = board
        self.given_up = False  # set by another thread to end the wait that is under way

    def dead(self) -> list[int]:
        """Global ranks on this host whose process is gone. Ranks of other hosts cannot be seen from here."""
        return [peer.rank for peer in self.table if lives(peer) is False]

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

        ``missing()`` are the places in the table of those who have not come, where that is known: then a
        rank that came and ended is not a lost one.

        Raises:
            PeerLost: a rank died, the backend failed, or ``timeout_s`` (by default the table's) passed.
        """
        began = time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        posted = False
        while not self._slice(work, operation, began + limit_s, on_gpu):
            if self.given_up:
                raise PeerLost(f"rank {self.me.rank} gave up {operation}", operation=operation)
            dead = self.dead()
            absent = None if missing is None else [self.table[i] for i in missing()]
            if absent is not None:  # asked after their processes: what a dead rank has done is final
                dead = [peer.rank for peer in absent if peer.rank in dead]
            waited_s = time.monotonic() - began
            if dead or (waited_s > limit_s and absent != []):
                raise self._lost(operation, waited_s, limit_s, None, dead, absent)
            if not posted:
                self.board.post(self.me.rank, operation, waiting=True)
            posted = True
        if posted:
            self.board.post(self.me.rank, operation, waiting=False)

    def _slice(self, work: device.Waitable, operation: str, deadline: float, on_gpu: bool) -> bool:
        left_s = deadline - time.monotonic()
        try:
            return device.done_within(work, max(min(SLICE_S, left_s), 0.001), on_gpu=on_gpu)
        except PeerLost:
            raise
        except RuntimeError as error:
            waited_s = self.timeout_s - left_s
            raise self._lost(operation, waited_s, self.timeout_s, error, self.confirm(), None) from error

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
            names = ", ".join(told(peer) for peer in self.table if peer.rank in dead)
            return PeerLost(
                f"{names} died: {where}. If it ended without an error, it had fewer batches or left the loop "
                "early: give every rank the same number, or use model.micro_batches(G)",
                ranks=dead,
                operation=operation,
            )
        if error is not None:
            reason = str(error).splitlines()[0][:200]
            return PeerLost(
                f"a rank left {operation}: {where}, then the backend said: {reason}", operation=operation
            )
        if absent is None:
            others = [peer for peer in self.table if peer.rank != self.me.rank]
            absent = [peer for peer in others if not self._came(peer, operation)]
        names = "; ".join(f"{told(peer)}, {self._whereabouts(peer)}" for peer in absent) or "some rank"
        return PeerLost(
            f"{where}, and never came: {names}. Look for a rank with other code or fewer steps, or raise "
            f"timeout_s ({limit_s:g} s)",
            ranks=[peer.rank for peer in absent],
            operation=operation,
        )

    def _came(self, peer: Peer, operation: str) -> bool:
        return self.board.read(peer.rank) == (operation, True)

    def _whereabouts(self, peer: Peer) -> str:
        lives_here = "alive" if lives(peer) else "on another host"
        match self.board.read(peer.rank):
            case None:
                return f"{lives_here}, has not waited for anybody so far"
            case (other, True):
                return f"{lives_here}, waits in {other}"
            case (other, False):
                return f"{lives_here}, last waited in {other}"

    def confirm(self) -> list[int]:
        """Dead ranks, giving a peer that has just hung up a moment to be gone."""
        until = time.monotonic() + CONFIRM_S
        while not (dead := self.dead()) and time.monotonic() < until:
            time.sleep(0.01)
        return dead


def told(peer: Peer) -> str:
    """How errors name it."""
    return f"rank {peer.rank} (pid {peer.pid} on {peer.host})"


def lives(peer: Peer) -> bool | None:
    """Whether the process of ``peer`` is still the one it was; None if it cannot be seen from here."""
    here = myself(peer.rank)
    if (peer.host, peer.pid_space) != (here.host, here.pid_space) or not peer.start_time:
        return None
    return _start_time(peer.pid) == peer.start_time
