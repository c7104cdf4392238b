"""What each rank is doing, for hang reports: a flight recorder per group, a debug server, and a table.

A hung rank cannot be asked afterwards, and recording call sites all the time would cost more than a small
collective. So the fast path notes a number, a name and the clock; the line of the user's program and the
stack are read from the running threads when a report asks for them.

The number counts the operations of the group. Ranks that made the same calls have the same number, so the
rank that is behind has skipped an operation, or has not reached it yet:

    rank  where                                       number  shape            site          seconds  state
       2  never came; after the exchange of bucket 1      31  float32 (2048,)  data.py:40 get   12.0  running
       0  in the exchange of bucket 2                     32  float32 (2048,)  train.py:8 fit   12.0  sleeping
          and 61 more in the same place
    rank 2 stands at (innermost last):
        ...

The rank that is missing does not know that others wait for it. They ask it by process id, over a socket
without a file: the debug server, one thread per process that has nothing else to do, answers with the row of
a flight recorder and the stack of the rank's own thread. Why not a signal: its handler belongs to the user's
program. Why not a store: a rank would have to poll it. A process that is stopped, or whose main thread holds
the interpreter lock in native code, gives no answer, and that is one. Both sides check with the kernel who
the other is: the same user, and the very process that was meant. The socket's name is visible in one network
namespace, so ranks of other hosts cannot be asked; for them there is the status store (``net.store``).
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import struct
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from instep.errors import Desync
from instep.launch.rank_exit import mark_secondary

if TYPE_CHECKING:
    from instep.net.peers import Peer

# Where a rank is relative to the operation that its row names.
BEFORE, IN, AFTER, FAILED, LEFT = "before", "in", "after", "failed in", "left"
NUM_FRAMES = 10
TEXT_LIMIT = 160
ROW_BYTES = 16384  # above NUM_FRAMES + 5 texts of TEXT_LIMIT characters of 4 bytes

# Of the debug server.
LATEST = ""  # instead of a group: the one that the process used last
ANSWER_S = 0.5  # for all answers together; a thread that may run answers within milliseconds
_QUESTION_BYTES = 256
_CREDENTIALS = struct.Struct("3i")  # process, user, group

# Of the table.
HEAD = ("rank", "where", "number", "shape", "site", "seconds", "state")
NUMERIC = {HEAD.index(name) for name in ("rank", "number", "seconds")}
NUM_ABSENT, NUM_PLACES, NUM_ALIKE, NUM_STACKS = 8, 6, 2, 3
SILENT = {
    "stopped": "its process is stopped: continue it with SIGCONT, or end it",
    "disk": "its process waits for a disk or a driver, where nothing can reach it",
    "gone": "its process has ended",
    "elsewhere": "it is on another host, where the ranks that wait cannot ask it",
}
HOLDS_LOCK = "its main thread is in native code that holds the interpreter lock"

_INSTEP = Path(__file__).parent.parent
# Frames in these folders belong to the libraries; all others, and instep's own programs, are the user's.
_MACHINERY = (
    f"{_INSTEP}{os.sep}",
    *(f"{path}{os.sep}" for path in getattr(find_spec("torch"), "submodule_search_locations", ())),
)
_PROGRAMS = tuple(f"{_INSTEP}{os.sep}{name}{os.sep}" for name in ("recipes", "bench"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep
_listing_frames = threading.Lock()


@dataclass(frozen=True)
class StatusRow:
    """What one rank is doing. Texts are printable, one line each, and capped.

    ``status`` is BEFORE (any operation), IN, AFTER, FAILED or LEFT; empty if nothing is known of the rank.
    ``since`` is the start of that status, in seconds of the wall clock. ``site`` is the line of the user's
    program, ``stack`` that of the rank's main thread, innermost last. ``state`` is the kernel's, where it can
    be read.
    """

    rank: int
    status: str = ""
    operation: str = ""
    number: int = 0
    what: str = ""
    since: float = 0.0
    site: str = ""
    stack: tuple[str, ...] = ()
    state: str = ""

    def to_bytes(self) -> bytes:
        """JSON of at most ``ROW_BYTES``."""
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @staticmethod
    def from_bytes(data: bytes) -> StatusRow:
        """The row that ``to_bytes`` wrote, without its ``state``.

        Raises:
            ValueError: ``data`` is no such row.
        """
        try:
            found = json.loads(data[:ROW_BYTES])
            status, operation, what, site = (
                printable(found[name]) for name in ("status", "operation", "what", "site")
            )
            stack = tuple(map(printable, found["stack"][:NUM_FRAMES]))
            number, since = int(found["number"]), float(found["since"])
            return StatusRow(int(found["rank"]), status, operation, number, what, since, site, stack)
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a row of a flight recorder: {error!r}") from error


class Problem(NamedTuple):
    """An error in parts: ``what`` happened, the same ``in_short``, and the ``fix``."""

    what: str
    in_short: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"

    def around(self, table: str) -> str:
        """The error with the ``status_table``: a log shows its first line, a terminal its last."""
        return f"{self}\n{table}\n{self.in_short}. {self.fix}"

    def beside(self, rank: int) -> str:
        """The error without the table, which ``rank`` prints for all ranks."""
        return f"{self}. Rank {rank} shows where each rank stands"

    def as_desync(self, rows: Sequence[StatusRow], place: int) -> Desync:
        """The error of the rank at ``place`` in the group, all of whose ranks have gathered ``rows``."""
        if place:
            return mark_secondary(Desync(self.beside(rows[0].rank)))
        return Desync(self.around(status_table(rows)))


def different_calls(rows: Sequence[StatusRow]) -> Problem:
    """The problem of ranks whose last operations, those of ``rows``, should have been the same."""
    is_one = len({row.operation for row in rows}) == 1
    calls: dict[str, list[StatusRow]] = {}
    for row in rows:
        call = row.what if row.what.startswith(row.operation) else row.operation
        more = f" ({row.what})" if is_one and call != row.what else ""
        calls.setdefault(call + more, []).append(row)
    said = "; ".join(
        f"rank{'s' * (len(same) > 1)} {_numbers(same)} call{'s' * (len(same) == 1)} {call}"
        + (same[0].site and f", at {same[0].site}")
        for call, same in calls.items()
    )
    fix = "All ranks of a group must call the same operations in the same order, with equal shapes and dtypes"
    return Problem(f"the ranks called different operations: {said}. Nothing was written", said, fix)


class FlightRecorder:
    """The last operation of ``rank`` on one group.

    ``begin`` and ``end`` bracket every operation; ``waiting_in`` names a long wait that belongs to none, such
    as for a message. Any thread may call ``row``.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.number = 0
        self.waiting_in: tuple[str, int] | None = None  # the operation, and its start by time.monotonic_ns()
        self._home = threading.get_ident()  # the thread that runs the rank's program
        self._last: tuple[str, object, int, int] = "any operation", "", 0, self._home
        self._status = BEFORE
        self._is_whole = False  # an operation of several parts is under way
        self._ended_ns = 0

    def belongs_here(self) -> None:
        """The rank's program runs in the calling thread, not in the one that made the group."""
        self._home = threading.get_ident()

    @contextmanager
    def as_one(self, operation: str) -> Iterator[None]:
        """Operations that begin in the block, different ones on each rank, are parts of ``operation``."""
        self.begin(operation)
        self._is_whole = True
        failed = True
        try:
            yield
            failed = False
        finally:
            self._is_whole = False
            self.end(failed=failed)

    def begin(self, operation: str, what: object = "") -> None:
        """This thread begins an operation; ``what`` is described by ``str``, or is (dtype, shape)."""
        if self._is_whole:
            return
        self.number += 1
        self._last = operation, what, time.monotonic_ns(), threading.get_ident()
        self._status = IN

    def end(self, *, failed: bool = False) -> None:
        """The last operation is over."""
        if self._is_whole or self._status == LEFT:
            return
        self._status = FAILED if failed else AFTER
        self._ended_ns = time.monotonic_ns()

    def leave(self) -> None:
        """The rank has left the last operation in the middle, and will begin no other."""
        self._status = LEFT
        self._ended_ns = time.monotonic_ns()

    @property
    def begun_ns(self) -> int:
        """The start of the last operation, by ``time.monotonic_ns()``; 0 if there was none."""
        return self._last[2]

    def row(self) -> StatusRow:
        """What the rank is doing now."""
        (operation, what, since_ns, thread), status, waiting_in = self._last, self._status, self.waiting_in
        if status != IN:
            since_ns, thread = self._ended_ns, self._home
            if waiting_in is not None:
                status, (operation, since_ns), what = IN, waiting_in, ""
        if isinstance(what, tuple):
            what = f"{str(what[0]).removeprefix('torch.')} {tuple(what[1])}"
        site, stack = _site_and_stack(thread, self._home)
        since = time.time() - (time.monotonic_ns() - since_ns) * 1e-9 if since_ns else 0.0
        texts = printable(operation), self.number, printable(what)
        return StatusRow(self.rank, status, *texts, since, site, stack)


_starting = threading.Lock()
_server_pid = 0  # of the process that has the thread: a forked child inherits the variable alone
_flights: weakref.WeakValueDictionary[str, FlightRecorder] = weakref.WeakValueDictionary()


def publish_flight(flight: FlightRecorder, me: Peer, group: str) -> None:
    """Let peers ask for ``flight``, that of ``me`` in ``group``, as long as it is referenced."""
    global _server_pid
    with _starting:
        if _server_pid != os.getpid():
            with suppress(OSError):  # no such sockets here, or no descriptor is left
                _start(me)
                _server_pid = os.getpid()
        _flights[_question(me, group)] = flight


def ask_peers(peers: Iterable[Peer], group: str, seconds: float = ANSWER_S) -> dict[int, StatusRow]:
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
            # If a silent one has taken all the time, those after it have answered long ago.
            connection.settimeout(max(until - time.monotonic(), 0.001))
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


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)


def running_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread of this process, by thread.

    Before 3.11.9 and 3.12.3 Python may collect garbage while it holds the lock of all threads for this list.
    A finalizer that releases the GIL, as that of a process group does, then deadlocks the process: the next
    thread that lists frames or starts a thread waits for that lock with the GIL held (python/cpython#106883).
    """
    with _listing_frames:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def printable(text: object) -> str:
    """One line of at most ``TEXT_LIMIT`` characters, none of which can control a terminal."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text)[: TEXT_LIMIT + 1])
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 1] + "…"


def words_of(error: BaseException) -> str:
    """The message of a backend's ``error`` in one line, without its place in C++ and general advice."""
    line = str(error).partition("\n")[0]
    return printable(re.sub(r"^\[\S+?:\d+\] ", "", line).partition(". ")[0])


def _site_and_stack(thread: int, home: int) -> tuple[str, tuple[str, ...]]:
    """The line of the user's program in ``thread``, else in ``home``, and the stack of ``home``."""
    frames = running_frames()
    try:
        outwards = [*_outwards(frames.get(home))]
        users = [frame for frame in (*_outwards(frames.get(thread)), *outwards) if not _is_machinery(frame)]
        return _line(users[0]) if users else "", tuple(map(_line, reversed(outwards[:NUM_FRAMES])))
    finally:  # this function's own frame is among them, and would keep all of them alive for ever
        frames.clear()
        outwards = users = []


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_machinery(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(("<", *_MACHINERY)):
        return not path.startswith(_PROGRAMS)
    return path.startswith(_STDLIB) and _PACKAGES not in path


def _line(frame: FrameType) -> str:
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return printable(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")


def status_table(rows: Sequence[StatusRow], absent: Collection[int] = ()) -> str:
    """``rows`` as a table: first the ``absent`` ranks, then the rarest places, with equal rows summed up.

    The stacks of the absent come below it. At most some twenty lines, and ten for each of three stacks.
    """
    missing = [row for row in rows if row.rank in absent]
    places: dict[tuple[str, str, int, str, str], list[StatusRow]] = {}
    for row in rows:
        if row.rank not in absent:
            places.setdefault((row.status, row.operation, row.number, row.what, row.site), []).append(row)
    rarest = sorted(places.values(), key=len)
    lines: list[Sequence[str] | str] = [HEAD]
    lines += [_cells(row, "never came; " if row.status else "never came") for row in missing[:NUM_ABSENT]]
    if more := missing[NUM_ABSENT:]:
        lines.append(f"and {len(more)} more that never came: {_numbers(more)}")
    for place in rarest[:NUM_PLACES]:
        lines += map(_cells, place[:NUM_ALIKE])
        if len(place) > NUM_ALIKE:
            lines.append(f"and {len(place) - NUM_ALIKE} more in the same place")
    if elsewhere := sum(map(len, rarest[NUM_PLACES:])):
        lines.append(f"and {elsewhere} more in other places")
    return "\n".join([*aligned(lines, NUMERIC), *_stacks(missing)])


def _cells(row: StatusRow, how: str = "") -> tuple[str, ...]:
    where = f"{row.status} {row.operation}" if row.status else "" if how else "unknown"
    seconds = f"{max(0.0, time.time() - row.since):.1f}" if row.since else ""
    number = str(row.number) if row.status else ""
    return str(row.rank), how + where, number, row.what, row.site, seconds, row.state


def aligned(lines: Sequence[Sequence[str] | str], right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines, in columns; those in ``right`` are right-aligned.

    A ``str`` among the lines belongs to no column.
    """
    rows = [line for line in lines if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [" " * (widths[0] + 2) + line if isinstance(line, str) else padded(line) for line in lines]


def _stacks(missing: Sequence[StatusRow]) -> list[str]:
    """The stacks of the absent, equal ones together, and why some have none."""
    lines: list[str] = []
    found: dict[tuple[str, ...], list[StatusRow]] = {}
    for row in missing:
        found.setdefault(row.stack or (row.state,), []).append(row)
    for rows in list(found.values())[:NUM_STACKS]:
        if rows[0].stack:
            lines.append(f"rank {_numbers(rows)} stands at (innermost last):")
            lines += [f"    {line}" for line in rows[0].stack]
        else:
            lines.append(f"rank {_numbers(rows)} gives no answer: {SILENT.get(rows[0].state, HOLDS_LOCK)}")
    return lines


def _numbers(rows: Sequence[StatusRow], most: int = 8) -> str:
    named = ", ".join(str(row.rank) for row in rows[:most])
    return named if len(rows) <= most else f"{named} and {len(rows) - most} more"
