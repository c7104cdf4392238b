"""Starting ranks on this host: ``launch(train, args, ranks=4)`` returns when all are done, or raises once.

Why not torch's elastic agent: its store listens on every interface and unpickles received bytes, and
starting an interpreter with torch takes seconds per rank. Here a *forkserver*, a process that has loaded
torch and done nothing else, forks each rank within milliseconds; ranks rendezvous in a file without a name
(``launch.memory_file``), so nothing listens; and one failure is one error, of the rank that failed first.

    launcher ──────────────> forkserver (holds torch)       the pipe between them closes with the launcher:
        │ pipe per rank        ├─ rank 0                    the forkserver ends
        │ (readable: ended)    └─ rank 1                    PDEATHSIG: the kernel kills the ranks

The launcher never polls; however it ends, SIGKILL included, no rank outlives it; a rank has its own session,
so Ctrl-C reaches the launcher only, and the helper processes of a rank end with it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from instep.launch.memory_file import MemoryFile
from instep.launch.rank_exit import Exit, RankFailed, root_cause
from instep.launch.rank_process import Child, read_record, run_child
from instep.launch.signals import STOP_SIGNALS, handled

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["Children", "RankFailed", "launch", "surroundings", "warm"]

# torch._dynamo: the constructor of an optimizer imports it, which would take a second in every rank.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "instep.mesh.join")
LONGEST_TMPDIR = 70  # the path of a socket has 107 characters, and multiprocessing adds 32


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

    A rank finds its place in the environment (``launch.launch_environment.detect``) and has this process's
    environment, directory and ``sys.path`` otherwise. Call it under ``if __name__ == "__main__":``, because a
    rank imports the main module. In the main thread SIGTERM and SIGHUP raise ``SystemExit`` meanwhile, unless
    the program handles or ignores them.

    Args:
        target: a function that a new process can import, with picklable ``args``.
        threads: intra-op threads of torch per rank, the same for one rank as for many.
        on_start: called with the process ids, by rank, once all are started.
        grace_s: after a failure the other ranks have this long to end by themselves, usually in
            ``PeerLost``, then as long again after SIGTERM, and then they are killed. The same happens when
            this process is interrupted or terminated.

    Raises:
        RankFailed: a rank raised, exited with a code other than 0, or was killed.
    """
    if ranks < 1 or threads < 1:
        raise ValueError(
            f"expected at least 1 rank of at least 1 thread, got ranks={ranks}, threads={threads}"
        )
    warm()
    exits: list[Exit] = []
    with handled([signal.SIGTERM, signal.SIGHUP], _unwind), closing(MemoryFile.create()) as store:
        children = Children()
        try:
            pids = []
            for rank in range(ranks):
                environ = surroundings(threads, place_of(rank, ranks, store))
                pids.append(children.start(Child(rank, threads, environ), target, args))
            if on_start is not None:
                on_start(pids)
            while children.running and not any(end.code for end in exits):
                exits += children.wait(None)[0]
            exits += children.wait_all(grace_s)  # after the first failure
        finally:
            children.stop(grace_s)
    cause = root_cause(exits)
    if cause is not None:
        raise RankFailed(cause, ranks)


def warm(*modules: str) -> None:
    """Start the forkserver if there is none, and return while it is still loading torch and ``modules``.

    The first ``launch`` does it too; a program that calls this first can do something else meanwhile.
    """
    multiprocessing.set_forkserver_preload(["instep.launch.forkserver", *PRELOAD, *modules])
    # Blocked for the forkserver until it ignores them, and for multiprocessing's resource tracker for good.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *STOP_SIGNALS])
    folder = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"  # for the forkserver's socket alone
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def place_of(rank: int, ranks: int, store: MemoryFile) -> dict[str, object]:
    """The variables of a rank of this host, whose world meets in ``store``."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return {**numbers, "INSTEP_STORE": store.path}


def surroundings(threads: int, place: Mapping[str, object]) -> dict[str, str]:
    """The environment of a rank at ``place``: this process's, and the settings of a rank on this host."""
    needed = {
        # gloo listens even when ranks rendezvous in a file: on loopback only.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    return {**os.environ, **{name: str(value) for name, value in {**needed, **place}.items()}}


class Children:
    """The processes of one launcher: started one by one, waited for, stopped, until none is ``running``.

    Each has a sentinel, a pipe that becomes readable when the process ends.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.running: dict[int, tuple[Child, ForkServerProcess]] = {}  # sentinel -> child, process

    def start(self, child: Child, target: Callable[..., object], args: tuple[Any, ...] = ()) -> int:
        """Start ``target(*args)`` in a new process; its process id. ``child`` is closed when it has ended.

        Raises:
            OSError: the system refuses another process.
        """
        # Not a daemon in multiprocessing's sense: those may not have children, and data loaders do.
        process = self.context.Process(
            target=run_child, args=(child, target, args), name=f"rank {child.number}"
        )
        try:
            process.start()
        except BaseException:
            child.close()
            raise
        self.running[process.sentinel] = child, process
        assert process.pid is not None
        return process.pid

    def wait(
        self, timeout_s: float | None, others: Sequence[Connection] = ()
    ) -> tuple[list[Exit], list[Connection]]:
        """Wait until a child has ended or one of ``others`` is readable; return these children and others."""
        ready = multiprocessing.connection.wait([*self.running, *others], timeout_s)
        ended = [self._reap(sentinel) for sentinel in ready if isinstance(sentinel, int)]
        return ended, [other for other in others if other in ready]

    def wait_all(self, timeout_s: float | None) -> list[Exit]:
        """Wait until all have ended or the time is up; return the ended ones."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        exits: list[Exit] = []
        while self.running:
            ended, _ = self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
            exits += ended
            if not ended:
                break
        return exits

    def stop(self, grace_s: float) -> None:
        """End all that still run. A second Ctrl-C skips the grace."""
        try:
            if grace_s:
                self._signal(signal.SIGTERM)
                self.wait_all(grace_s)
        finally:
            self._signal(signal.SIGKILL)
            self.wait_all(None)

    def _reap(self, sentinel: int) -> Exit:
        child, process = self.running.pop(sentinel)
        process.join()
        assert process.pid is not None and process.exitcode is not None
        # Kill the helpers that it left behind; now, while its id cannot belong to another process.
        _signal_group(process.pid, signal.SIGKILL)
        end = Exit(child.number, process.pid, process.exitcode, read_record(child))
        process.close()
        child.close()
        return end

    def _signal(self, number: signal.Signals) -> None:
        for _, process in self.running.values():
            if process.pid is not None and process.is_alive() and not _signal_group(process.pid, number):
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(process.pid, number)  # it has no session of its own yet


def _signal_group(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _unwind(number: int) -> None:
    raise SystemExit(128 + number)
