"""Starting ranks on this host: ``launch(train, args, ranks=4)`` returns when all are done, or raises once.

Why not torch's elastic agent: its store listens on every interface and unpickles what it is sent, and
starting an interpreter with torch takes seconds per rank. Here a *forkserver*, a process that has loaded
torch and done nothing else, forks each rank within milliseconds; ranks meet in a file of a private
directory, so nothing listens; and one failure is one error, of the rank that failed first.

    launcher ──────────────> forkserver (holds torch)       the pipe between them closes with the launcher:
        │ pipe per rank        ├─ rank 0                    the forkserver ends
        │ (readable: ended)    └─ rank 1                    PDEATHSIG: the kernel kills the ranks

What holds: the launcher never polls; whatever way it ends, SIGKILL included, no rank outlives it; a rank
is in a session of its own, so Ctrl-C reaches the launcher only, and its helpers end with it.
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from instep.mesh.exits import RECORD_LIMIT_BYTES, ErrorRecord, Exit, RankFailed, root_cause

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

__all__ = ["RankFailed", "launch", "warm"]

# torch._dynamo: an optimizer's constructor imports it, which takes a second in every rank that has to.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "instep.mesh.join")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PR_SET_PDEATHSIG = 1

# Starting the forkserver borrows this process's signal handler and environment for a moment.
_starting = threading.Lock()


def launch(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    *,
    ranks: int,
    threads: int = 1,
    on_start: Callable[[list[int]], None] | None = None,
    grace_s: float = 2.0,
) -> None:
    """Run ``target(*args)`` in ``ranks`` processes of this host and wait for all of them.

    A rank finds its place in the environment (``mesh.place.detect``) and has this process's environment,
    directory and ``sys.path`` otherwise. Call it under ``if __name__ == "__main__":``, because a rank
    imports the main module.

    Args:
        target: a function that a new process can import, with picklable ``args``.
        threads: intra-op threads of torch per rank, the same for one rank as for many.
        on_start: called with the process ids, by rank, once all are started.
        grace_s: after a failure the other ranks have this long to end by themselves, usually in
            ``PeerLost``, then as long again after SIGTERM, and then they are killed. So also when this
            process is interrupted or terminated.

    Raises:
        RankFailed: a rank raised, exited with a code other than 0, or was killed.
    """
    if ranks < 1 or threads < 1:
        raise ValueError(
            f"expected at least 1 rank of at least 1 thread, got ranks={ranks}, threads={threads}"
        )
    warm()
    with _terminate_unwinds(), tempfile.TemporaryDirectory(prefix="instep-") as directory:
        world = _World(Path(directory))
        try:
            for rank in range(ranks):
                world.start(_Seat(rank, ranks, threads, directory, dict(os.environ)), target, args)
            if on_start is not None:
                on_start(world.pids)
            world.watch(grace_s)
            cause = root_cause(world.exits)
        finally:
            world.stop(grace_s)
    if cause is not None:
        raise RankFailed(cause, ranks)


def warm(*modules: str) -> None:
    """Start the forkserver if there is none, and return while it is still loading torch and ``modules``.

    The first ``launch`` does it too; a program that calls this first can do something else meanwhile.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    with _starting, _ignored_interrupt(), _one_blas_thread():
        multiprocessing.forkserver.ensure_running()


class _World:
    """The processes of one launch: started one by one, watched, then stopped, until none is ``running``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context = multiprocessing.get_context("forkserver")
        self.running: dict[int, tuple[int, ForkServerProcess]] = {}  # sentinel -> rank, process
        self.pids: list[int] = []
        self.exits: list[Exit] = []

    def start(self, seat: _Seat, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        # Not a daemon in multiprocessing's sense: those may not have children, and data loaders do.
        process = self.context.Process(target=_rank, args=(seat, target, args), name=f"rank {seat.rank}")
        process.start()
        self.running[process.sentinel] = seat.rank, process
        assert process.pid is not None
        self.pids.append(process.pid)

    def watch(self, grace_s: float) -> None:
        """Wait for all, but for no longer than ``grace_s`` after the first failure."""
        while self.running and not any(end.code for end in self.exits):
            self._wait(None)
        self._wait_all(grace_s)

    def stop(self, grace_s: float) -> None:
        """End what still runs. A second Ctrl-C skips the grace."""
        try:
            self._signal(signal.SIGTERM)
            self._wait_all(grace_s)
        finally:
            self._signal(signal.SIGKILL)
            self._wait_all(None)

    def _wait_all(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.running and self._wait(None if deadline is None else max(0, deadline - time.monotonic())):
            pass

    def _wait(self, timeout_s: float | None) -> bool:
        """Block until a rank has ended, and record all that have; False if the time was up before."""
        ended = multiprocessing.connection.wait(list(self.running), timeout_s)
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank, process = self.running.pop(sentinel)
            process.join()
            assert process.pid is not None
            assert process.exitcode is not None
            # Helpers that the rank left behind; at once, while its id cannot be anybody else's.
            _signal_group(process.pid, signal.SIGKILL)
            self.exits.append(Exit(rank, process.pid, process.exitcode, self._record(rank)))
            process.close()
        return bool(ended)

    def _record(self, rank: int) -> ErrorRecord | None:
        try:
            with _record_path(self.directory, rank).open("rb") as file:
                return ErrorRecord.from_bytes(file.read(RECORD_LIMIT_BYTES))
        except FileNotFoundError:
            return None

    def _signal(self, number: signal.Signals) -> None:
        for _, process in self.running.values():
            if process.pid is not None and process.is_alive() and not _signal_group(process.pid, number):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(process.pid, number)  # too young for a session of its own


def _signal_group(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(frozen=True)
class _Seat:
    """What a new rank is told."""

    rank: int
    ranks: int
    threads: int
    directory: str
    environ: dict[str, str]

    def environment(self) -> dict[str, str]:
        place = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "INSTEP_STORE": Path(self.directory) / "store",
            # gloo listens even when ranks meet in a file: on loopback only.
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            "OPENBLAS_NUM_THREADS": self.threads,
        }
        return self.environ | {name: str(value) for name, value in place.items()}


def _rank(seat: _Seat, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """A rank's life, in the new process."""
    _end_with_launcher()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The forkserver's environment is the launcher's of the day it was born.
    os.environ.clear()
    os.environ.update(seat.environment())
    faulthandler.enable()
    # OMP_NUM_THREADS is too late for a torch that the forkserver has loaded.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(seat.threads)
    try:
        target(*args)
    except SystemExit:
        raise
    except BaseException as error:
        _leave_record(ErrorRecord.of(error), _record_path(seat.directory, seat.rank))
        # Now, without destructors and exit hooks: they may wait for peers that wait for us.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


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


def _record_path(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"error-{rank}.json"


def _leave_record(record: ErrorRecord, path: Path) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(record.to_bytes())
    except OSError:  # no space, or the launcher has gone
        print(record.traceback, file=sys.stderr)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _terminate_unwinds() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit`` in the block, so that it cleans up as after an exception.

    A program that has handlers of its own, or ignores them, keeps that; so does a launch in a thread.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)  # cleaning up is not interrupted by a second one
        raise SystemExit(128 + number)

    both = (signal.SIGTERM, signal.SIGHUP) if _in_main_thread() else ()
    taken = [number for number in both if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, unwind)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _ignored_interrupt() -> Iterator[None]:
    """What is started in the block ignores Ctrl-C from its first instruction, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if _in_main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """What is started in the block has no threads when it forks: numpy's BLAS starts some at its import."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
