"""A rank's process, which ends with its launcher, whatever way that ends. Pure.

A rank that raises leaves a record of its error in a file of the launcher's (``rank_exit``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from instep.mesh.memory_file import MemoryFile
from instep.mesh.process_state import look
from instep.mesh.rank_exit import RECORD_LIMIT_BYTES, ErrorRecord
from instep.mesh.signals import STOP_SIGNALS

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGQUIT  # which asks a Unix process for its core, and here for its Python stacks
# Their ranks end with them. A shell that sets RANK may end before the ranks that it has started, and Slurm
# sees to what is left of a job.
PARENT_LAUNCHERS = frozenset({"torchrun", "openmpi"})
_watching = threading.Lock()
_watched = 0  # the process that watches its parent: a child inherits the variable, not the thread


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
