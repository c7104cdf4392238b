"""How a waiting rank learns what other ranks are doing: a debug server in each process, and a status store.

A rank that waits can say so, but the rank that is missing does not know that others wait for it. They ask it
by process id, over a socket without a file: the debug server, one thread that has nothing else to do, answers
with the row of a flight recorder and the stack of the rank's own thread (``hang_report``). Why not a signal:
its handler belongs to the user's program. Why not a store: a rank would have to poll it. The cost is a thread
that sleeps in ``accept`` and a descriptor. A process that is stopped, or whose main thread holds the
interpreter lock in native code, gives no answer, and that is one. Both sides check with the kernel who the
other is: the same user, and the very process that was meant.

The socket's name is visible in one network namespace, so ranks of other hosts cannot be asked. They read the
status store instead, the store that the group was made in: a rank that has waited for long writes there what
the ranks of its host are doing. An ordinary step, also one with a slow rank, writes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from instep.mesh.hang_report import ROW_BYTES, FlightRecorder, StatusRow
from instep.mesh.store_client import StoreClient

if TYPE_CHECKING:
    from torch.distributed import Store

    from instep.mesh.peers import Peer

T = TypeVar("T")
LATEST = ""  # instead of a group: the one that the process used last
ANSWER_S = 0.5  # for all answers together; a thread that may run answers within milliseconds
_QUESTION_BYTES = 256
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_starting = threading.Lock()
_server_pid = 0  # of the process that has the thread: a forked child inherits the variable alone
_flights: weakref.WeakValueDictionary[str, FlightRecorder] = weakref.WeakValueDictionary()


def register(flight: FlightRecorder, me: Peer, group: str) -> None:
    """Let peers ask for ``flight``, that of ``me`` in ``group``, as long as it is referenced."""
    global _server_pid
    with _starting:
        if _server_pid != os.getpid():
            _flights.clear()
            with suppress(OSError, AttributeError):  # no such sockets here, or no descriptor is left
                _start(me)
                _server_pid = os.getpid()
        _flights[_question(me, group)] = flight


def ask(peers: Iterable[Peer], group: str, seconds: float = ANSWER_S) -> dict[int, StatusRow]:
    """The rows of ``peers`` of this host in ``group``, by rank: those that come within ``seconds`` in all."""
    rows: dict[int, StatusRow] = {}
    asked: dict[int, socket.socket] = {}
    for peer in peers:
        if peer.pid == os.getpid():
            if (flight := _find(_question(peer, group))) is not None:
                rows[peer.rank] = flight.row()
        elif (connection := _connect(peer, group)) is not None:
            asked[peer.rank] = connection
    until = time.monotonic() + seconds
    for rank, connection in asked.items():
        with connection, suppress(OSError, ValueError):  # it gives no answer, or has ended meanwhile
            connection.settimeout(
                max(until - time.monotonic(), 0.001)
            )  # a silent one before it took the time
            rows[rank] = StatusRow.from_bytes(connection.recv(ROW_BYTES))
    return rows


def _connect(peer: Peer, group: str) -> socket.socket | None:
    """A connection to the debug server of ``peer``, with the question sent."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_address(peer))
        if _credentials(connection)[0] == peer.pid:
            connection.send(_question(peer, group).encode())
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start(me: Peer) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(me))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    threading.Thread(target=_serve, args=(listener,), name="instep debug server", daemon=True).start()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor is left, or the peer that asked has gone
            time.sleep(ANSWER_S)
            continue
        with connection, suppress(Exception):  # whatever is wrong with one question, others may follow
            connection.settimeout(ANSWER_S)
            if _credentials(connection)[1] == os.getuid():
                flight = _find(connection.recv(_QUESTION_BYTES).decode())
                if flight is not None:
                    connection.send(flight.row().to_bytes())
                del flight


def _question(peer: Peer, group: str) -> str:
    """Ranks may be threads of one process, so the rank is a part of it."""
    return f"{peer.rank} {group}" if group else LATEST


def _find(question: str) -> FlightRecorder | None:
    if question != LATEST:
        return _flights.get(question)
    return max(list(_flights.values()), key=lambda flight: flight.begun_ns, default=None)


def _address(peer: Peer) -> str:
    """No file has this name: it begins with a zero byte, and ends with the process."""
    return f"\0instep/{peer.pid_space}/{peer.pid}/{peer.start_time}"


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(data)
    return pid, user, group


class StatusStore:
    """The last status of every rank of one group, in the ``store`` of that group; without one it stays empty.

    Reading and posting neither fail nor wait for long: they happen when something else has failed, perhaps
    the store's host, or the network to it. A store that is slow is asked again; one that is gone is not,
    because torch's client writes to stderr at each call.
    """

    def __init__(self, store: Store | None = None, rank: int = 0) -> None:
        self._store = store
        self._client = StoreClient(rank)

    def post(self, row: StatusRow) -> None:
        """Let all ranks read what ``row.rank`` is doing."""
        self._try(lambda store: store.set(_key(row.rank), row.to_bytes().decode()))

    def read(self, rank: int) -> StatusRow | None:
        """The last row that was posted about ``rank``."""

        def read(store: Store) -> StatusRow | None:
            return StatusRow.from_bytes(store.get(_key(rank))) if store.check([_key(rank)]) else None

        return self._try(read)

    def report_lost(self, ranks: Sequence[int], *, dead: bool) -> tuple[list[int], bool]:
        """Report lost ranks to all, and return what was reported first; a death takes precedence.

        Other ranks end because of the first one.
        """

        def report(store: Store) -> tuple[list[int], bool]:
            before = _lost(store)
            if before[1] or (before[0] and not dead) or not ranks:
                return before
            store.set(_key("lost"), json.dumps([[*ranks], dead]))
            return [*ranks], dead

        return self._try(report) or ([*ranks], dead)

    def lost(self) -> tuple[list[int], bool]:
        """The ranks that were reported lost, and whether they are dead."""
        return self._try(_lost) or ([], False)

    def _try(self, question: Callable[[Store], T]) -> T | None:
        """The store's answer; None if there is none in time, or no store."""
        store = self._store
        if store is not None:
            try:
                return self._client.call(lambda: question(store))
            except (TimeoutError, ValueError):  # it is slow; or others have written there
                pass
            except Exception:
                self._store = None
        return None


def _key(what: int | str) -> str:
    return f"instep/status/{what}"


def _lost(store: Store) -> tuple[list[int], bool]:
    if not store.check([_key("lost")]):
        return [], False
    ranks, dead = json.loads(store.get(_key("lost")))
    return [int(rank) for rank in ranks], dead is True
