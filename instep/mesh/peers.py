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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from instep.errors import PeerLost

SLICE = timedelta(milliseconds=200)
RECORD_BYTES = 256
# A closed connection is seen before the kernel has finished the peer's exit.
CONFIRM_S = 1.0


class Waitable(Protocol):
    """What torch.distributed returns for an operation that is under way."""

    def wait(self, timeout: timedelta) -> bool: ...
    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Peer:
    """One rank's process: enough to tell it from every other process of its host."""

    rank: int
    host: str
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat; 0 where there is no /proc

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
        return Peer(int(fields["rank"]), str(fields["host"]), int(fields["pid"]), int(fields["start_time"]))


def myself(rank: int) -> Peer:
    """This process as ``rank``."""
    return Peer(rank, socket.gethostname()[:128], os.getpid(), _start_time(os.getpid()) or 0)


def _start_time(pid: int) -> int | None:
    """When process ``pid`` began, or None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


class Peers:
    """The table of a group's ranks; entry i belongs to the i-th rank of the group."""

    def __init__(self, table: Sequence[Peer], me: Peer, timeout_s: float) -> None:
        self.table = tuple(table)
        self.me = me
        self.timeout_s = timeout_s

    def dead(self) -> list[int]:
        """Global ranks on this host whose process is gone. Ranks of other hosts cannot be seen from here."""
        return [peer.rank for peer in self.table if self._is_local(peer) and not lives(peer)]

    def wait(self, work: Waitable, operation: str) -> None:
        """Block until ``work`` is done.

        Raises:
            PeerLost: a rank died, the backend failed, or ``timeout_s`` passed.
        """
        began = time.monotonic()
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._lost(operation, began, error) from error
            if self.dead() or time.monotonic() - began > self.timeout_s:
                raise self._lost(operation, began, None)

    def _lost(self, operation: str, began: float, error: Exception | None) -> PeerLost:
        """The error to raise; ``error`` is what the backend said, None if it said nothing."""
        dead = self._confirm() if error is not None else self.dead()
        waited = time.monotonic() - began
        where = f"rank {self.me.rank} waited {waited:.1f} s in {operation}"
        if dead:
            names = ", ".join(
                f"rank {p.rank} (pid {p.pid} on {p.host})" for p in self.table if p.rank in dead
            )
            return PeerLost(f"{names} died: {where}", ranks=dead, operation=operation)
        if error is not None:
            reason = str(error).splitlines()[0][:200]
            return PeerLost(
                f"a rank left {operation}: {where}, then the backend said: {reason}", operation=operation
            )
        others = ", ".join(str(p.rank) for p in self.table if p.rank != self.me.rank)
        return PeerLost(
            f"{where} for rank {others}, all of them alive as far as this host can see, but one never came: "
            f"look for a rank that runs other code or fewer steps, or raise timeout_s ({self.timeout_s:g} s)",
            operation=operation,
        )

    def _confirm(self) -> list[int]:
        """Dead ranks, giving a peer that has just hung up a moment to be gone."""
        until = time.monotonic() + CONFIRM_S
        while not (dead := self.dead()) and time.monotonic() < until:
            time.sleep(0.01)
        return dead

    def _is_local(self, peer: Peer) -> bool:
        return peer.host == self.me.host and peer.start_time > 0 and peer.pid != self.me.pid


def lives(peer: Peer) -> bool:
    """Whether the process of ``peer``, on this host, is still the one it was."""
    return _start_time(peer.pid) == peer.start_time
