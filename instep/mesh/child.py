"""A rank's process from its first instruction: it ends with its launcher, and says why it failed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.mesh.exits import RECORD_LIMIT_BYTES, ErrorRecord
from instep.mesh.signals import POLITE

PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGQUIT  # which asks a Unix process for its core, and here for its Python stacks


@dataclass(frozen=True)
class Child:
    """What a new process is told: its ``number`` among those of its launcher, and all of its environment."""

    number: int
    threads: int
    directory: str
    environ: Mapping[str, str]

    @property
    def record(self) -> Path:
        """Where it writes why it failed."""
        return Path(self.directory) / f"error-{self.number}.json"

    @property
    def stacks(self) -> Path:
        """Where it writes its Python stacks on ``STACKS_SIGNAL``, whatever holds its interpreter."""
        return Path(self.directory) / f"stacks-{self.number}"


def live(child: Child, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """A rank's life, in the new process."""
    _end_with_launcher()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in POLITE:  # ignored by the forkserver
        signal.signal(number, signal.SIG_DFL)
    # The forkserver's environment is the launcher's of the day it was born.
    os.environ.clear()
    os.environ.update(child.environ)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # no space: its stack will be missing in a table
        stacks = open(os.open(child.stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    # OMP_NUM_THREADS is too late for a torch that the forkserver has loaded.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(child.threads)
    try:
        target(*args)
    except SystemExit:
        raise
    except BaseException as error:
        _leave_record(ErrorRecord.of(error), child.record)
        leave(1)


def leave(code: int) -> None:
    """End this process now, without destructors and exit hooks: they may wait for peers that wait for us."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def read_record(child: Child) -> ErrorRecord | None:
    """What ``child`` has written before it ended, or None."""
    try:
        with child.record.open("rb") as file:
            return ErrorRecord.from_bytes(file.read(RECORD_LIMIT_BYTES))
    except FileNotFoundError:
        return None


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


def _leave_record(record: ErrorRecord, path: Path) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(record.to_bytes())
    except OSError:  # no space, or the launcher has gone
        print(record.traceback, file=sys.stderr)
