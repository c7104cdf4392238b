"""A rank's process: from its first instruction to how it ended, and which failure explains the others. Pure.

It ends with its launcher, whatever way that ends. When one rank fails the others fail too, moments later:
they lose a peer. Four tracebacks on a terminal say less than one, if it is the right one. So a rank that
raises leaves a record of its error in a file of the launcher's, and of all exits ``root_cause`` chooses the
one to report.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, TypeVar

from instep.errors import InstepError
from instep.mesh.memory_file import MemoryFile
from instep.mesh.process_state import look
from instep.mesh.signals import STOP_SIGNALS

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGQUIT  # which asks a Unix process for its core, and here for its Python stacks
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

# Their ranks end with them. A shell that sets RANK may end before the ranks that it has started, and Slurm
# sees to what is left of a job.
PARENT_LAUNCHERS = frozenset({"torchrun", "openmpi"})
_watching = threading.Lock()
_watched = 0  # the process that watches its parent: a child inherits the variable, not the thread

E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Child:
    """What a new process is told: its ``number`` among those of its launcher, and all of its environment.

    ``record`` is where it writes why it failed, ``stacks`` where it writes its Python stacks on
    ``STACKS_SIGNAL``, whatever holds its interpreter. Both are the launcher's, which closes them.
    """

    number: int
    threads: int
    environ: Mapping[str, str]
    record: MemoryFile = field(default_factory=MemoryFile.create)
    stacks: MemoryFile = field(default_factory=MemoryFile.create)

    def close(self) -> None:
        """Its launcher has read what there was to read."""
        self.record.close()
        self.stacks.close()


def said(error: BaseException) -> str:
    """What ``error`` says; of one of the operating system the file first, and without its number."""
    if isinstance(error, OSError) and error.strerror:
        file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{file}{error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)


def as_told(error: E) -> E:
    """``error``, marked as one that another rank has raised first, and reports."""
    error.told = True  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True)
class ErrorRecord:
    """The exception that ended a rank, as the rank wrote it down; times are ``time.monotonic_ns()``.

    ``told`` is an attribute that an exception may have (``as_told``): another rank raised it first, and
    reports it.
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


def run_child(child: Child, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run ``target(*args)`` as a rank, in its new process."""
    _end_with_launcher()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOP_SIGNALS:  # ignored by the forkserver
        signal.signal(number, signal.SIG_DFL)
    # The forkserver's environment is the launcher's of the day it was born.
    os.environ.clear()
    os.environ.update(child.environ)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # the launcher has gone
        stacks = os.fdopen(child.stacks.open(), "w")
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    # OMP_NUM_THREADS is too late for a torch that the forkserver has loaded.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(child.threads)
    try:
        target(*args)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            _write_record(ErrorRecord.of(error), child.record)
        except OSError:
            if look(child.record.pid) is not None:  # else its launcher has gone, and that is why
                traceback.print_exception(error)
        exit_now(1)


def exit_now(code: int) -> NoReturn:
    """End this process now, without destructors and exit hooks: they may wait for peers that wait for us."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_record(child: Child) -> ErrorRecord | None:
    """What ``child`` has written before it ended, or None. Its launcher asks."""
    return ErrorRecord.from_bytes(os.pread(child.record.fd, RECORD_LIMIT_BYTES, 0))


def _end_with_launcher() -> None:
    """Have the kernel kill this rank when the forkserver ends, and the forkserver end with the launcher.

    The latter needs help: multiprocessing gives every child the write end of the pipe whose closing ends
    the forkserver, so that children would keep it, and themselves, alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = multiprocessing.forkserver._forkserver
    if (alive := getattr(server, "_forkserver_alive_fd", None)) is not None:
        os.close(alive)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if not launcher.is_alive():  # it died before the kernel knew
        os._exit(1)


def end_with_parent() -> None:
    """From now on this process is killed when its parent has ended; nothing, where there are no pidfds.

    For ranks of launchers that are not ours. torchrun that is killed leaves its ranks, which would train on
    to the end beside those of its successor. The kernel's signal at a parent's death would not do: it comes
    when the *thread* ends that has forked the rank, and which thread of another program that was is not
    known. So a thread of the rank sleeps on a descriptor of the parent process.
    """
    global _watched
    with _watching:
        if _watched == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        parent = os.getppid()
        try:
            pidfd = os.pidfd_open(parent)
        except OSError:  # an old kernel, or no descriptor is left
            return
        name = "instep parent watch"
        threading.Thread(target=_watch_parent, args=(parent, pidfd), name=name, daemon=True).start()
        _watched = os.getpid()


def _watch_parent(parent: int, pidfd: int) -> None:
    if os.getppid() == parent:  # else it ended before there was a descriptor, which then may be a stranger's
        multiprocessing.connection.wait([pidfd])  # not select, which knows descriptors below 1024 only
    with contextlib.suppress(OSError):
        os.write(2, f"instep: pid {os.getpid()} ends: its launcher (pid {parent}) has ended\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _write_record(record: ErrorRecord, to: MemoryFile) -> None:
    try:
        with os.fdopen(to.open(), "wb") as file:
            file.write(record.to_bytes())
    except OSError:  # no memory, or the launcher has gone
        print(record.traceback, file=sys.stderr)


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
