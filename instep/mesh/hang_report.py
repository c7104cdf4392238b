"""What each rank is doing, for the report of a hang: a flight recorder per group, and a table of all ranks.

A rank that hangs cannot be asked afterwards, and writing down call sites all the time would cost more than
small collectives do. So the fast path notes a number, a name and the clock; the line of the user's program
and the stack are read from the running threads at the moment in which they are asked for.

The number counts the operations of the group. Ranks that have called the same have the same, so the one that
is behind has skipped something, or stands before it:

    rank  where                                       number  shape            site          seconds  state
       2  never came; after the exchange of bucket 1      31  float32 (2048,)  data.py:40 get   12.0  running
       0  in the exchange of bucket 2                     32  float32 (2048,)  train.py:8 fit   12.0  sleeping
          and 61 more in the same place
    rank 2 stands at (innermost last):
        ...

How a rank learns the rows of the others: ``mesh.debug_server``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Where a rank is in relation to the operation that its row names.
BEFORE, IN, AFTER, FAILED = "before", "in", "after", "failed in"
ANY = "any operation"
NUM_RECENT = 6
NUM_FRAMES = 10
TEXT_LIMIT = 160
ROW_BYTES = 8192  # of a row in JSON, at most
_NS = 1e-9

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
# Frames in here say how a collective was called. All others are the user's, and so are instep's own programs.
_MACHINERY = (
    f"{_INSTEP}{os.sep}",
    *(f"{path}{os.sep}" for path in getattr(find_spec("torch"), "submodule_search_locations", ())),
)
_PROGRAMS = tuple(f"{_INSTEP}{os.sep}{name}{os.sep}" for name in ("recipes", "bench"))
_looking = threading.Lock()
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep


@dataclass(frozen=True)
class StatusRow:
    """Where one rank stands. Texts are printable, one line each, and capped.

    ``status`` is BEFORE (then the operation is ANY), IN, AFTER or FAILED; empty if nothing is known of the
    rank. ``since`` is when that began, in seconds of the wall clock. ``site`` is the line of the user's
    program, ``stack`` that of the thread that made the group, innermost last, ``recent`` are the operations
    before, the last first. ``state`` is what the system says of the process, where it can be seen.
    """

    rank: int
    status: str = ""
    operation: str = ""
    number: int = 0
    what: str = ""
    since: float = 0.0
    site: str = ""
    stack: tuple[str, ...] = ()
    recent: tuple[str, ...] = ()
    state: str = ""

    @property
    def seconds(self) -> float:
        """How long it has stood there."""
        return max(0.0, time.time() - self.since) if self.since else 0.0

    def to_bytes(self) -> bytes:
        """JSON of at most ``ROW_BYTES``; without the stack if that would make it longer."""
        fields = asdict(self)
        data = json.dumps(fields, ensure_ascii=False).encode()
        if len(data) > ROW_BYTES:
            data = json.dumps({**fields, "stack": (), "recent": ()}, ensure_ascii=False).encode()
        return data

    @staticmethod
    def from_bytes(data: bytes) -> StatusRow:
        """The row that ``to_bytes`` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(data[:ROW_BYTES])
            return StatusRow(
                int(found["rank"]),
                printable(found["status"]),
                printable(found["operation"]),
                int(found["number"]),
                printable(found["what"]),
                float(found["since"]),
                printable(found["site"]),
                tuple(map(printable, found["stack"][:NUM_FRAMES])),
                tuple(map(printable, found["recent"][:NUM_RECENT])),
            )
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a row of a flight recorder: {error!r}") from error


class Problem(NamedTuple):
    """What an error says: ``what`` has happened, the same ``in_short``, and what to do, the ``fix``."""

    what: str
    in_short: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"

    def around(self, table: str) -> str:
        """With the ``status_table``. A log shows its first line, a terminal its last: both say what to do."""
        return f"{self}\n{table}\n{self.in_short}. {self.fix}" if table else str(self)

    def beside(self, rank: int) -> str:
        """Without it, where ``rank`` says all: as many times the same table would bury what is said."""
        return f"{self}. Rank {rank} shows where each rank stands"


class FlightRecorder:
    """The last operations of ``rank`` on one group.

    ``begin`` and ``end`` bracket every operation; ``waits`` and ``waited`` a wait that has become long, also
    one that belongs to no operation of all ranks, such as for a message. ``row`` is asked for by any thread.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.number = 0
        self._home = threading.get_ident()  # the thread whose program is the rank's
        self._recent: deque[tuple[int, str, object, int, int]] = deque(maxlen=NUM_RECENT + 1)
        self._status = BEFORE
        self._is_whole = False  # an operation that has parts is under way
        self._ended_ns = 0
        self._waits: dict[int, tuple[str, int]] = {}  # by thread

    def belongs_here(self) -> None:
        """The program of the rank runs in this thread, and not in the one that has met its peers."""
        self._home = threading.get_ident()

    @contextmanager
    def as_one(self, operation: str) -> Iterator[None]:
        """What this thread begins in the block, not the same on all ranks, is a part of one ``operation``."""
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
        entry = self.number, operation, what, time.monotonic_ns(), threading.get_ident()
        self._recent.append(entry)
        self._status = IN

    def end(self, *, failed: bool = False) -> None:
        """The operation that was begun last is over."""
        if self._is_whole:
            return
        self._status = FAILED if failed else AFTER
        self._ended_ns = time.monotonic_ns()

    def waits(self, operation: str, since_ns: int) -> None:
        """This thread has waited in ``operation`` for long, since a time of ``time.monotonic_ns``."""
        self._waits[threading.get_ident()] = operation, since_ns

    def waited(self) -> None:
        """This thread waits no more."""
        self._waits.pop(threading.get_ident(), None)

    @property
    def begun_ns(self) -> int:
        """When the last operation was begun, by ``time.monotonic_ns()``; 0 if none was."""
        return self._recent[-1][3] if self._recent else 0

    def row(self) -> StatusRow:
        """Where the rank stands now."""
        recent, waits = list(self._recent), min(self._waits.values(), key=lambda w: w[1], default=None)
        number, operation, what, since_ns, thread = recent[-1] if recent else (0, ANY, "", 0, self._home)
        status = self._status
        if status != IN:
            since_ns, thread = self._ended_ns, self._home
            if waits is not None:
                status, (operation, since_ns), what = IN, waits, ""
        site, lines = _look_around(thread, self._home)
        return StatusRow(
            self.rank,
            status,
            printable(operation),
            number,
            printable(described(what)),
            time.time() - (time.monotonic_ns() - since_ns) * _NS if since_ns else 0.0,
            site,
            lines,
            tuple(printable(f"#{entry[0]} {entry[1]}") for entry in reversed(recent[:-1])),
        )


def running_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread of this process, by thread.

    Before 3.11.9 and 3.12.3 Python collects garbage while it makes this list under the lock of all threads.
    A finalizer that lets go of the GIL, as that of a process group does, then stops the process for ever: the
    next thread that asks, or starts another one, waits for that lock with the GIL in hand
    (python/cpython#106883).
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def described(what: object) -> str:
    """ "float32 (3, 4)" for a dtype and a shape, else its own words."""
    if isinstance(what, tuple):
        dtype, shape = what
        return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return str(what)


def printable(text: object) -> str:
    """One line of at most ``TEXT_LIMIT`` characters, none of which can steer a terminal."""
    line = str(text)[: TEXT_LIMIT + 1]
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 1] + "…"


def words_of(error: BaseException) -> str:
    """What a backend's ``error`` says, in one line: without its place in C++ and advice for all cases."""
    line = str(error).partition("\n")[0]
    return printable(re.sub(r"^\[\S+?:\d+\] ", "", line).partition(". ")[0])


def _look_around(thread: int, home: int) -> tuple[str, tuple[str, ...]]:
    """The site of ``thread``, or if it has none that of ``home``, and the stack of ``home``."""
    frames = running_frames()
    try:
        home_frame = frames.get(home)
        return _site(frames.get(thread)) or _site(home_frame), _stack(home_frame)
    finally:  # this function's own frame is among them, and would hold all the others for ever
        frames.clear()
        home_frame = None


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost lines of a thread, the last one last."""
    lines = [_line(inner) for inner, _ in zip(_outwards(frame), range(NUM_FRAMES), strict=False)]
    return tuple(reversed(lines))


def _site(frame: FrameType | None) -> str:
    """The innermost line of the user's program, or nothing if there is none in this thread."""
    return next((_line(inner) for inner in _outwards(frame) if not _is_machinery(inner)), "")


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
    """``rows`` as a table: first the ``absent`` ranks, then the odd ones, then the others, summed up.

    The stacks of the absent come below it. At most some twenty lines, and ten for each of three stacks.
    """
    missing = [row for row in rows if row.rank in absent]
    lines: list[Sequence[str] | str] = [HEAD]
    lines += [_cells(row, "never came; " if row.status else "never came") for row in missing[:NUM_ABSENT]]
    more = missing[NUM_ABSENT:]
    if more:
        lines.append(f"and {len(more)} more that never came: {_numbers(more)}")
    places = _places(row for row in rows if row.rank not in absent)
    for place in places[:NUM_PLACES]:
        lines += [_cells(row) for row in place[:NUM_ALIKE]]
        if len(place) > NUM_ALIKE:
            lines.append(f"and {len(place) - NUM_ALIKE} more in the same place")
    elsewhere = [row for place in places[NUM_PLACES:] for row in place]
    if elsewhere:
        lines.append(f"and {len(elsewhere)} more in other places")
    return "\n".join([*aligned(lines, NUMERIC), *_stacks(missing)])


def _places(rows: Iterable[StatusRow]) -> list[list[StatusRow]]:
    """The rows by line and operation, the places with the fewest ranks first: those are the odd ones."""
    found: dict[tuple[str, str, int, str, str], list[StatusRow]] = {}
    for row in rows:
        found.setdefault((row.status, row.operation, row.number, row.what, row.site), []).append(row)
    return sorted(found.values(), key=len)


def _cells(row: StatusRow, how: str = "") -> tuple[str, ...]:
    where = f"{row.status} {row.operation}" if row.status else "" if how else "unknown"
    seconds = f"{row.seconds:.1f}" if row.since else ""
    number = str(row.number) if row.status else ""
    return str(row.rank), how + where, number, row.what, row.site, seconds, row.state


def aligned(lines: Sequence[Sequence[str] | str], right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines, columns below each other; numbers of columns in ``right`` to the right.

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
    """The stacks of the absent, those with the same one together, and why some have none."""
    lines: list[str] = []
    found: dict[tuple[str, ...], list[StatusRow]] = {}
    for row in missing:
        found.setdefault(row.stack or (row.state,), []).append(row)
    for rows in list(found.values())[:NUM_STACKS]:
        name = f"rank {_numbers(rows)}"
        if not rows[0].stack:
            lines.append(f"{name} gives no answer: {SILENT.get(rows[0].state, HOLDS_LOCK)}")
            continue
        lines.append(f"{name} stands at (innermost last):")
        lines += [f"    {line}" for line in rows[0].stack]
        if rows[0].recent:
            lines.append(f"    its operations before, the last first: {', '.join(rows[0].recent)}")
    return lines


def _numbers(rows: Sequence[StatusRow], most: int = 8) -> str:
    named = ", ".join(str(row.rank) for row in rows[:most])
    return named if len(rows) <= most else f"{named} and {len(rows) - most} more"
