"""Where a process answers when its peers ask what it is doing: one thread, asleep until somebody does.

Who waits can say so, but the rank that is missed does not know that it is. It is asked, by its process id,
over a socket without a file, and a thread that has nothing else to do answers with the row of a flight and
the stack of the rank's own thread. Why not a signal: its handler belongs to the user's program. Why not a
store: to be called by one means to poll it, or to keep a connection for it.

It costs a thread that sleeps in ``accept`` and a descriptor. What it cannot do: a process that is stopped, or
whose main thread holds the interpreter lock in native code, gives no answer, and that is one. Both sides see
from the kernel who the other is: the same user, and the very process that was meant.

The name of the socket is seen in one network namespace only, so ranks of other hosts cannot be asked.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from instep.mesh.flight import ROW_BYTES, Flight, Row

if TYPE_CHECKING:
    from instep.mesh.peers import Peer

LATEST = -1  # instead of a flight's number: of all flights the one that has begun something last
ANSWER_S = 0.5  # for all answers together; a thread that may run answers within milliseconds
_QUESTION_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_making = threading.Lock()
_desk: _Desk | None = None


class _Desk:
    """This process's: ``flights`` by the number under which peers know them."""

    def __init__(self, me: Peer) -> None:
        self.pid = os.getpid()
        self.flights: weakref.WeakValueDictionary[int, Flight] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_address(me))
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        thread = threading.Thread(
            target=_serve, args=(listener, self.flights), name="instep desk", daemon=True
        )
        thread.start()


def register(flight: Flight, me: Peer) -> int:
    """Let peers ask for ``flight``, for as long as it is held; the number to ask for, 0 where they cannot."""
    global _desk
    with _making:
        if _desk is None or _desk.pid != os.getpid():  # a child inherits the variable, not the thread
            try:
                _desk = _Desk(me)
            except (OSError, AttributeError):  # no such sockets here, or no descriptor is left
                return 0
        number = next(_desk.numbers)
        _desk.flights[number] = flight
        return number


def ask(peers: Iterable[Peer], seconds: float = ANSWER_S) -> dict[int, Row]:
    """What ``peers`` of this host answer, by rank, within ``seconds`` in all. Who is silent is not in it."""
    rows: dict[int, Row] = {}
    asked: dict[socket.socket, Peer] = {}
    for peer in peers:
        if peer.pid == os.getpid():
            flight = _desk.flights.get(peer.flight) if _desk is not None else None
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
                rows[peer.rank] = Row.from_bytes(answered.recv(ROW_BYTES))
    for silent in asked:
        silent.close()
    return rows


def _connect(peer: Peer) -> socket.socket | None:
    """A connection to the desk of ``peer``, with the question sent."""
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


def _serve(listener: socket.socket, flights: weakref.WeakValueDictionary[int, Flight]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor is left, or whoever asked has gone
            time.sleep(ANSWER_S)
            continue
        with connection, suppress(Exception):  # whatever is wrong with one question, others may follow
            connection.settimeout(ANSWER_S)
            if _credentials(connection)[1] == os.getuid():
                flight = _find(flights, int(connection.recv(_QUESTION_BYTES)))
                if flight is not None:
                    connection.send(flight.row().to_bytes())
                del flight


def _find(flights: weakref.WeakValueDictionary[int, Flight], number: int) -> Flight | None:
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
