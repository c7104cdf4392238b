"""How a rank ended, and which failure explains the others. Pure.

When one rank fails the others fail too, moments later: they lose a peer. Four tracebacks on a terminal say
less than one, if it is the right one. So a rank that raises leaves a record of its error in a file of the
launcher's, and of all exits ``root_cause`` chooses the one to report.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from instep.errors import InstepError

# A record's texts are cut to this many characters each, of which JSON writes at most six as bytes.
MESSAGE_LIMIT, TRACEBACK_LIMIT = 1 << 13, 1 << 16
RECORD_LIMIT_BYTES = 1 << 19
# Errors that say that another rank failed.
CONSEQUENCES = frozenset({"instep.errors.PeerLost"})
HINTS = {
    -signal.SIGKILL: "out of memory? or did somebody kill it? The kernel's log (dmesg) says; if it was "
    "memory, try fewer ranks or smaller micro-batches",
    -signal.SIGSEGV: "a crash in native code, the Python stack is on stderr",
    -signal.SIGBUS: "a crash in native code, or no space left in /dev/shm; the Python stack is on stderr",
    -signal.SIGABRT: "native code gave up, its message and the Python stack are on stderr",
    -signal.SIGILL: "native code was built for another CPU",
    255: "which is also what is left when the forkserver itself is killed, for want of memory or by somebody",
}

E = TypeVar("E", bound=Exception)


def said(error: BaseException) -> str:
    """What ``error`` says; of one of the operating system the file first, and without its number."""
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
    """The exception that ended a rank, as the rank wrote it down; times are ``time.monotonic_ns()``.

    ``told`` is an attribute that an exception may have (``mark_secondary``): another rank raised it first,
    and reports it.
    """

    type: str  # with its module unless that is builtins: "ValueError", "instep.errors.PeerLost"
    message: str
    traceback: str
    time_ns: int
    told: bool = False

    @staticmethod
    def of(error: BaseException) -> ErrorRecord:
        """The record of an exception that was caught, without the frame that caught it."""
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(kind, error, frames))
        return ErrorRecord(
            f"{module}{kind.__qualname__}",
            said(error)[:MESSAGE_LIMIT],
            text[-TRACEBACK_LIMIT:],
            time.monotonic_ns(),
            bool(getattr(error, "told", False)),
        )

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> ErrorRecord | None:
        """What ``to_bytes`` wrote, or None if that was nothing, or not to the end."""
        try:
            fields = json.loads(data)
        except ValueError:
            return None
        return ErrorRecord(
            str(fields["type"]),
            str(fields["message"]),
            str(fields["traceback"]),
            int(fields["time_ns"]),
            bool(fields["told"]),
        )


@dataclass(frozen=True)
class Exit:
    """How a rank ended: ``code`` is negative for a signal, ``error`` is None if it wrote nothing."""

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

    A rank that a signal killed could not say when, but the others fail because of it; so it goes first.
    Then comes the earliest error that does not blame a peer. SIGABRT comes after those: a backend aborts
    its process when it loses a peer. Then exits without a word, and last what blames a peer.
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
    """How it ended, as errors and tables say it, with its ``cause``, else with a hint where there is one."""
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
