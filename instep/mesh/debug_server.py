"""How a rank that waits learns what the others are doing: a debug server in each process, and a status store.

A rank that waits can say so, but the rank that is missed does not know that it is. It is asked, by its
process id, over a socket without a file: the debug server, one thread that has nothing else to do, answers
with the row of a flight recorder and the stack of the rank's own thread (``hang_report``). Why not a signal:
its handler belongs to the user's program. Why not a store: to be called by one means to poll it, or to keep a
connection for it. It costs a thread that sleeps in ``accept`` and a descriptor. What it cannot do: a process
that is stopped, or whose main thread holds the interpreter lock in native code, gives no answer, and that is
one. Both sides see from the kernel who the other is: the same user, and the very process that was meant.

The name of the socket is seen in one network namespace only, so ranks of other hosts cannot be asked. Between
hosts there is the status store: a rank that has to wait writes into the store that the world met in what it
waits for. All that wait are there, so the rank that never came is the one that is not. That happens only
after a wait has become long; an ordinary step writes nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from instep.mesh.hang_report import ROW_BYTES, FlightRecorder, StatusRow
from instep.mesh.store_client import PATIENCE_S, StoreClient

if TYPE_CHECKING:
    from torch.distributed import Store

    from instep.mesh.peers import Peer


LATEST = -1  # instead of the number of a recorder: the one that has begun an operation last
ANSWER_S = 0.5  # for all answers together; a thread that may run answers within milliseconds
_QUESTION_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_making = threading.Lock()
_server: _DebugServer | None = None


class _DebugServer:
    """That of this process: ``flights`` are its flight recorders, by the number that peers ask for."""

    def __init__(self, me: Peer) -> None:
        self.pid = os.getpid()
        self.flights: weakref.WeakValueDictionary[int, FlightRecorder] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_address(me))
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        thread = threading.Thread(
            target=_serve, args=(listener, self.flights), name="instep debug server", daemon=True
        )
        thread.start()


def register(flight: FlightRecorder, me: Peer) -> int:
    """Let peers ask for ``flight``, for as long as it is held; the number to ask for, 0 where they cannot."""
    global _server
    with _making:
        if _server is None or _server.pid != os.getpid():  # a child inherits the variable, not the thread
            try:
                _server = _DebugServer(me)
            except (OSError, AttributeError):  # no such sockets here, or no descriptor is left
                return 0
        number = next(_server.numbers)
        _server.flights[number] = flight
        return number


def ask(peers: Iterable[Peer], seconds: float = ANSWER_S) -> dict[int, StatusRow]:
    """What ``peers`` of this host answer, by rank, within ``seconds`` in all; without those that do not."""
    rows: dict[int, StatusRow] = {}
    asked: dict[socket.socket, Peer] = {}
    for peer in peers:
        if peer.pid == os.getpid():
            flight = _server.flights.get(peer.flight) if _server is not None else None
            if flight is not None:
                rows[peer.rank] = flight.row()
        elif peer.flight and (connection := _connect(peer)) is not None:
            asked[connection] = peer
    until = time.monotonic() + seconds
    while asked and (ready := wait(list(asked), max(0.0, until - time.monotonic()))):
        for answered in ready:
            assert isinstance(answered, socket.socket)
            peer = asked.pop(answered)
            with answered, suppress(OSError, ValueError):  # it ended meanwhile: no answer
                rows[peer.rank] = StatusRow.from_bytes(answered.recv(ROW_BYTES))
    for silent in asked:
        silent.close()
    return rows


def _connect(peer: Peer) -> socket.socket | None:
    """A connection to the debug server of ``peer``, with the question sent."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_address(peer))
        if _credentials(connection)[0] == peer.pid:
            connection.send(str(peer.flight).encode())
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _serve(listener: socket.socket, flights: weakref.WeakValueDictionary[int, FlightRecorder]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor is left, or the peer that asked has gone
            time.sleep(ANSWER_S)
            continue
        with connection, suppress(Exception):  # whatever is wrong with one question, others may follow
            connection.settimeout(ANSWER_S)
            if _credentials(connection)[1] == os.getuid():
                flight = _find(flights, int(connection.recv(_QUESTION_BYTES)))
                if flight is not None:
                    connection.send(flight.row().to_bytes())
                del flight


def _find(flights: weakref.WeakValueDictionary[int, FlightRecorder], number: int) -> FlightRecorder | None:
    if number != LATEST:
        return flights.get(number)
    return max(list(flights.values()), key=lambda flight: flight.begun_ns, default=None)


def _address(peer: Peer) -> str:
    """No file has this name: it begins with a zero byte, and ends with the process."""
    return f"\0instep/{peer.pid_space}/{peer.pid}/{peer.start_time}"


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(data)
    return pid, user, group


class StatusStore:
    """The last status of every global rank, in ``store`` under ``name``. Without a store it stays empty.

    Each rank makes as many of a name as the others; a new one does not show what was posted in the last.
    Reading and posting may not fail, nor wait: they happen when something else has failed, perhaps the
    store's host, or the network to it, and then each call of a store takes the store's own deadline, minutes.
    So it is asked with ``StoreClient``.
    """

    def __init__(self, store: Store | None = None, name: str = "", rank: int = 0) -> None:
        self.client = StoreClient(rank, PATIENCE_S)
        made = store and self.client.try_call(lambda: store.add(f"instep/status/{name}/made by {rank}", 1))
        self.client.close()
        self._store = store if made else None
        self._name = f"{name}/{made}"

    def post(self, row: StatusRow) -> None:
        """Let all ranks read where ``row.rank`` stands."""
        if self._store is not None:
            store, key, value = self._store, self._key(row.rank), row.to_bytes().decode()
            self.client.try_call(lambda: store.set(key, value))

    def read(self, rank: int) -> StatusRow | None:
        """What was posted last about ``rank``."""
        if self._store is None:
            return None
        store, key = self._store, self._key(rank)
        return self.client.try_call(
            lambda: StatusRow.from_bytes(store.get(key)) if store.check([key]) else None
        )

    def tell_lost(self, ranks: Sequence[int], *, dead: bool) -> tuple[list[int], bool]:
        """Let all ranks read which are lost, and read it: what is told first counts, unless it saw no death.

        Other ranks end because of the first one.
        """
        store, key, mine = self._store, self._key("lost"), ([*ranks], dead)
        if store is None:
            return mine

        def tell() -> tuple[list[int], bool]:
            before = _read_lost(store, key)
            if before[1] or (before[0] and not dead) or not ranks:
                return before
            store.set(key, json.dumps({"ranks": mine[0], "dead": dead}))
            return mine

        return self.client.try_call(tell) or mine

    def lost(self) -> tuple[list[int], bool]:
        """The ranks that are lost, as the others have told, and whether they are dead."""
        store, key = self._store, self._key("lost")
        if store is None or (found := self.client.try_call(lambda: _read_lost(store, key))) is None:
            self._store = None  # it is gone, and writes to stderr at each question
            return [], False
        return found

    def _key(self, what: int | str) -> str:
        return f"instep/status/{self._name}/{what}"


def _read_lost(store: Store, key: str) -> tuple[list[int], bool]:
    found: dict[str, Any] = {"ranks": [], "dead": False}
    if store.check([key]):
        found = json.loads(store.get(key))
    return [int(rank) for rank in found["ranks"]], found["dead"] is True
