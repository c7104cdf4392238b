"""The process of a rank, which ends with its launcher, however that ends. Pure.

A rank that raises leaves a record of its error in a file of the launcher's (``rank_exit``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from instep.launch.memory_file import MemoryFile
from instep.launch.rank_exit import RECORD_LIMIT_BYTES, ErrorRecord
from instep.launch.signals import STOP_SIGNALS

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGQUIT  # asks a Unix process for a core dump, and here for its Python stacks
# Their ranks end with them. A shell that sets RANK may end before the ranks that it has started, and Slurm
# cleans up after a job.
PARENT_LAUNCHERS = frozenset({"torchrun", "openmpi"})


@dataclass(frozen=True)
class Child:
    """A new process: its ``number`` among those of its launcher, and its whole environment.

    It writes its error into ``record``, and on ``STACKS_SIGNAL`` its Python stacks into ``stacks``, whatever
    holds its interpreter. Both files are the launcher's, which closes them.
    """

    number: int
    threads: int
    environ: Mapping[str, str]
    record: MemoryFile = field(default_factory=MemoryFile.create)
    stacks: MemoryFile = field(default_factory=MemoryFile.create)

    def close(self) -> None:
        """Close the files; its launcher has read them."""
        self.record.close()
        self.stacks.close()


def run_child(child: Child, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run ``target(*args)`` as a rank, in its new process."""
    _end_with_launcher()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOP_SIGNALS:  # ignored by the forkserver
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.set_start_method(None, force=True)  # Python's own default, and not what it began with
    os.environ.clear()  # the forkserver's is the launcher's at the time of its start
    os.environ.update(child.environ)
    for stream in (sys.stdout, sys.stderr):
        # Under PYTHONUNBUFFERED print() writes a text and its newline apart: lines of ranks would mix.
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
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
        record = ErrorRecord.of(error)
        with contextlib.suppress(OSError):
            try:
                with os.fdopen(child.record.open(), "wb") as file:
                    file.write(record.to_bytes())
            except OSError:  # no memory, or the launcher has gone
                print(record.traceback, file=sys.stderr)
        exit_now(1)


def exit_now(code: int) -> NoReturn:
    """End this process now, without destructors and exit hooks: they may wait for peers that wait for us."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_record(child: Child) -> ErrorRecord | None:
    """The error that ``child`` recorded before it ended, or None; for its launcher."""
    return ErrorRecord.from_bytes(os.pread(child.record.fd, RECORD_LIMIT_BYTES, 0))


def _end_with_launcher() -> None:
    """Have the kernel kill this rank when the forkserver ends, and the forkserver end with the launcher.

    The latter needs help: multiprocessing gives every child the write end of the pipe whose closing ends
    the forkserver, so children would keep it, and themselves, alive.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = multiprocessing.forkserver._forkserver
    if (alive := getattr(server, "_forkserver_alive_fd", None)) is not None:
        os.close(alive)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if not launcher.is_alive():  # it died before PDEATHSIG was set
        os._exit(1)


def end_with_parent() -> None:
    """From now on this process is killed when its parent has ended; no effect where there are no pidfds.

    For ranks of other launchers. torchrun that is killed leaves its ranks, which would train on to the end
    beside those of its successor. PDEATHSIG would not do: the kernel sends it when the *thread* ends that has
    forked the rank, and another program may end that thread at any time. So a thread of the rank sleeps on a
    descriptor of the parent process.
    """
    _watch_parent(os.getpid())


@cache  # by pid: a forked child inherits the cache, not the thread
def _watch_parent(pid: int) -> None:
    parent = os.getppid()
    try:
        pidfd = os.pidfd_open(parent)
    except (AttributeError, OSError):  # an old kernel, or no descriptor is left
        return

    def watch() -> None:
        if os.getppid() == parent:  # else it ended before the pidfd was opened, which may be a stranger's
            multiprocessing.connection.wait([pidfd])  # not select, which knows descriptors below 1024 only
        with contextlib.suppress(OSError):
            os.write(2, f"instep: pid {pid} ends: its launcher (pid {parent}) has ended\n".encode())
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="instep parent watch", daemon=True).start()
