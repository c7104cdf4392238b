"""How a rank ended, and which failure explains the others. Pure.

When one rank fails the others fail too, moments later: they lose a peer. One right traceback on a terminal
says more than four. So a rank that raises writes a record of its error into a file of the launcher's, and
``root_cause`` chooses among all exits the one to report.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from instep.errors import InstepError

# The texts of a record are cut to this many characters each, of which JSON writes at most six as bytes.
MESSAGE_LIMIT, TRACEBACK_LIMIT = 1 << 13, 1 << 16
RECORD_LIMIT_BYTES = 1 << 19
# Errors that say that another rank failed.
CONSEQUENCES = frozenset({"instep.errors.PeerLost"})
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "safetensors"}
RUNS_SCRIPTS = "instep.run.script"
# What these raise may be what a user's data set has raised, in a worker process.
READERS = frozenset({"instep.data.loader", "instep.data.keyed_samples", "instep.data.sample_shards"})
HINTS = {
    -signal.SIGKILL: "out of memory? or did somebody kill it? The kernel's log (dmesg) says; if it was "
    "memory, try fewer ranks or smaller micro-batches",
    -signal.SIGSEGV: "a crash in native code, the Python stack is on stderr",
    -signal.SIGBUS: "a crash in native code, or no space left in /dev/shm; the Python stack is on stderr",
    -signal.SIGABRT: "native code gave up, its message and the Python stack are on stderr",
    -signal.SIGILL: "native code was built for another CPU",
    255: "which is also the code where the forkserver itself is killed, for want of memory or by somebody",
}

E = TypeVar("E", bound=Exception)


def said(error: BaseException) -> str:
    """The message of ``error``; for an ``OSError`` the file first, and without the number."""
    if isinstance(error, OSError) and error.strerror:
        file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{file}{error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)


def mark_secondary(error: E) -> E:
    """``error``, marked as one that another rank has raised first, and reports."""
    error.told = True  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True)
class ErrorRecord:
    """The exception that ended a rank, as the rank wrote it down; ``time_ns`` is ``time.monotonic_ns()``.

    ``told``: another rank raised it first, and reports it (``mark_secondary``). ``is_ours``: instep raised
    it, or what instep called; else the user's own code did, data sets included.
    """

    type: str  # with its module unless that is builtins: "ValueError", "instep.errors.PeerLost"
    message: str
    traceback: str
    time_ns: int
    told: bool = False
    is_ours: bool = True

    @staticmethod
    def of(error: BaseException) -> ErrorRecord:
        """The record of a caught exception, without the frame that caught it, and those that ran a script."""
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        frames = caught = error.__traceback__.tb_next if error.__traceback__ else None
        while frames and frames.tb_frame.f_globals.get("__name__") == RUNS_SCRIPTS:
            frames = frames.tb_next
        return ErrorRecord(
            f"{module}{kind.__qualname__}",
            said(error)[:MESSAGE_LIMIT],
            "".join(traceback.format_exception(kind, error, frames or caught))[-TRACEBACK_LIMIT:],
            time.monotonic_ns(),
            bool(getattr(error, "told", False)),
            _is_ours(error),
        )

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> ErrorRecord | None:
        """The record that ``to_bytes`` wrote, or None if it is missing or incomplete."""
        try:
            return ErrorRecord(**json.loads(data))
        except (TypeError, ValueError):
            return None


def _is_ours(error: BaseException) -> bool:
    """Whether the innermost frame that is of no library is instep's."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    own = [name for name in names if name.partition(".")[0] not in LIBRARIES]
    return not own or (own[-1].startswith("instep.") and own[-1] not in READERS)


@dataclass(frozen=True)
class Exit:
    """How a rank ended: ``code`` is negative for a signal, ``error`` is None if it recorded nothing."""

    rank: int
    pid: int
    code: int
    error: ErrorRecord | None = None


class RankFailed(InstepError):
    """A rank ended with an error, and this is the rank whose failure explains the others'.

    ``type_name`` is the type of its exception as in ``ErrorRecord.type``, "" if it raised none;
    ``rank_traceback`` is its traceback as text; ``exit`` is the whole record.
    """

    def __init__(self, failed: Exit, ranks: int) -> None:
        self.exit = failed
        self.type_name = failed.error.type if failed.error else ""
        self.rank_traceback = failed.error.traceback if failed.error else ""
        super().__init__(f"rank {failed.rank} of {ranks} (pid {failed.pid}) {describe_exit(failed)}")


def root_cause(exits: Sequence[Exit]) -> Exit | None:
    """The failure that explains the others; ``exits`` are in the order in which they were noticed.

    A rank killed by a signal left no time of its failure, but the others fail because of it: it goes first.
    Then comes the earliest error that does not blame a peer. SIGABRT comes after those: a backend aborts
    its process when it loses a peer. Then exits without a record, and last errors that blame a peer.
    """

    def order(end: Exit) -> tuple[int, int]:
        if end.code < 0:
            return (2 if end.code == -signal.SIGABRT else 0), 0
        if end.error is None:
            return 3, 0
        blames_a_peer = end.error.told or end.error.type in CONSEQUENCES
        return (4 if blames_a_peer else 1), end.error.time_ns

    return min((end for end in exits if end.code != 0), key=order, default=None)


def describe_exit(failed: Exit, cause: str = "") -> str:
    """How it ended, for errors and tables, with its ``cause``, else with a hint where there is one."""
    if failed.error is not None:
        kind = "" if failed.error.type == "OSError" else f" with {failed.error.type}"  # the message says more
        return f"failed{kind}: {failed.error.message}".removesuffix(": ")
    text = f"exited with code {failed.code}"
    if failed.code < 0:
        names = {number.value: number.name for number in signal.Signals}
        text = f"was killed by {names.get(-failed.code, f'signal {-failed.code}')}"
    if cause:
        return f"{text}, {cause}"
    hint = HINTS.get(failed.code)
    return f"{text}: {hint}" if hint else text
