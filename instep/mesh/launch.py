"""Starting ranks on this host: ``launch(train, args, ranks=4)`` returns when all are done, or raises once.

Why not torch's elastic agent: its store listens on every interface and unpickles what it is sent, and
starting an interpreter with torch takes seconds per rank. Here a *forkserver*, a process that has loaded
torch and done nothing else, forks each rank within milliseconds; ranks meet in a file without a name
(``mesh.memory_file``), so nothing listens; and one failure is one error, of the rank that failed first.

    launcher ──────────────> forkserver (holds torch)       the pipe between them closes with the launcher:
        │ pipe per rank        ├─ rank 0                    the forkserver ends
        │ (readable: ended)    └─ rank 1                    PDEATHSIG: the kernel kills the ranks

What holds: the launcher never polls; whatever way it ends, SIGKILL included, no rank outlives it; a rank
is in a session of its own, so Ctrl-C reaches the launcher only, and its helpers end with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from instep.mesh.memory_file import MemoryFile
from instep.mesh.process_state import look
from instep.mesh.rank_exit import Exit, RankFailed, root_cause
from instep.mesh.rank_process import Child, read_record, run_child
from instep.mesh.signals import STOP_SIGNALS, handled

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["Children", "RankFailed", "launch", "surroundings", "warm"]

# torch._dynamo: an optimizer's constructor imports it, which takes a second in every rank that has to.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "instep.mesh.join")
SET_UP = "instep.mesh.forkserver"  # the last
ANSWER_S = 120.0  # for the forkserver, which may still be loading torch, to start a process
REVIVE_S = 1.0  # between two looks at the forkserver
MAX_UNREPORTED = 5  # looks at a process that has ended, of which the forkserver has not told
LONGEST_PATH = 60  # of a directory, so that a socket in a directory in it fits into 104 characters
HELD = "/proc/self/fd/"
NO_PROCESS, RAISE_LIMIT = "no process can be started", "raise pids.max or ulimit -u"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_held: list[int] = []  # the descriptor of the forkserver's socket
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

    A rank finds its place in the environment (``mesh.launch_environment.detect``) and has this process's
    environment, directory and ``sys.path`` otherwise. Call it under ``if __name__ == "__main__":``, because a
    rank imports the main module.

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
    exits: list[Exit] = []
    with _terminate_unwinds(), closing(MemoryFile.create()) as store:
        children = Children()
        try:
            pids = []
            for rank in range(ranks):
                environ = surroundings(threads, _place(rank, ranks, store))
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
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules, SET_UP])
    _ensure_forkserver()


def _ensure_forkserver() -> None:
    """Start the forkserver if there is none, or if it has ended."""
    with _starting, _ignored(), _one_blas_thread(), _passing_directory(), _socket_with_a_file():
        multiprocessing.forkserver.ensure_running()


class Children:
    """The processes of one launcher: started one by one, waited for, stopped, until none is ``running``.

    No child is polled: each has a sentinel, a pipe that becomes readable when it ends. The forkserver writes
    it, and is looked at every ``REVIVE_S``, however short the waits: one that was stopped would hide the end
    of all of them. One that cannot be made to go on is killed, and all of them with it, as soon as the end of
    one is hidden: the pipes are closed then.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.running: dict[int, tuple[Child, ForkServerProcess]] = {}  # sentinel -> child, process
        self._looked = time.monotonic()
        self._unreported: dict[int, int] = {}  # sentinel -> looks that have found the process ended

    def start(
        self,
        child: Child,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        *,
        answer_s: float = ANSWER_S,
    ) -> int:
        """Start ``target(*args)`` in a new process; its process id. ``child`` is closed when it has ended.

        Raises:
            OSError: there can be no more processes; those that run go on.
            TimeoutError: the forkserver gives no answer within ``answer_s``.
        """
        if _has_ended(_forkserver_pid()):
            _ensure_forkserver()
        # Not a daemon in multiprocessing's sense: those may not have children, and data loaders do.
        process = self.context.Process(
            target=run_child, args=(child, target, args), name=f"rank {child.number}"
        )
        try:
            _start_within(answer_s, process)
            pid = process.pid
            assert pid is not None
            if pid < 0:  # mesh.forkserver
                _forget(process)
                raise OSError(-pid, f"{NO_PROCESS}: {os.strerror(-pid)}: {RAISE_LIMIT}")
        except BrokenPipeError as error:  # the fork had failed before the forkserver was told what to run
            child.close()
            raise OSError(f"{NO_PROCESS}: the forkserver has hung up: {RAISE_LIMIT}") from error
        except BaseException:
            child.close()
            raise
        self.running[process.sentinel] = child, process
        return pid

    def wait(
        self, timeout_s: float | None, others: Sequence[Connection] = ()
    ) -> tuple[list[Exit], list[Connection]]:
        """Block until a child has ended or one of ``others`` can be read: those that have, and those."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = REVIVE_S if until is None else max(0.0, min(REVIVE_S, until - time.monotonic()))
            ready = multiprocessing.connection.wait([*self.running, *others], left_s)
            if time.monotonic() - self._looked >= REVIVE_S:
                self._look_at_forkserver(ready)
            if ready or (until is not None and time.monotonic() >= until):
                break
        ended = [self._bury(sentinel) for sentinel in ready if isinstance(sentinel, int)]
        return ended, [other for other in others if other in ready]

    def wait_all(self, timeout_s: float | None) -> list[Exit]:
        """Block until all have ended, or the time is up: those that have."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        exits: list[Exit] = []
        while self.running:
            ended, _ = self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
            exits += ended
            if not ended:
                break
        return exits

    def stop(self, grace_s: float) -> list[Exit]:
        """End what still runs. A second Ctrl-C skips the grace."""
        exits = []
        try:
            if grace_s:
                self._signal(signal.SIGTERM)
                exits = self.wait_all(grace_s)
        finally:
            self._signal(signal.SIGKILL)
            exits += self.wait_all(None)
        return exits

    def _look_at_forkserver(self, ready: Sequence[object]) -> None:
        """Let it go on if it was stopped; kill it if it still does not tell that a process has ended.

        Looks are counted, not seconds: the launcher may have been stopped, too.
        """
        self._looked = time.monotonic()
        _revive()
        hidden = [
            sentinel
            for sentinel, (_, process) in self.running.items()
            if sentinel not in ready and _has_ended(process.pid)
        ]
        self._unreported = {sentinel: self._unreported.get(sentinel, 0) + 1 for sentinel in hidden}
        if max(self._unreported.values(), default=0) >= MAX_UNREPORTED:
            _kill_forkserver()

    def _bury(self, sentinel: int) -> Exit:
        child, process = self.running.pop(sentinel)
        process.join()
        assert process.pid is not None
        assert process.exitcode is not None
        # Helpers that it left behind; at once, while its id cannot be anybody else's.
        _signal_group(process.pid, signal.SIGKILL)
        end = Exit(child.number, process.pid, process.exitcode, read_record(child))
        process.close()
        child.close()
        return end

    def _signal(self, number: signal.Signals) -> None:
        for _, process in self.running.values():
            if process.pid is not None and process.is_alive() and not _signal_group(process.pid, number):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(process.pid, number)  # too young for a session of its own


def _start_within(seconds: float, process: ForkServerProcess) -> None:
    """Start ``process``, for which the forkserver may keep us waiting, and see meanwhile to the forkserver.

    One that is started later is killed at once.
    """
    errors: list[BaseException] = []
    started, given_up = threading.Event(), threading.Event()

    def run() -> None:
        try:
            process.start()
            started.set()
            if given_up.is_set():
                _kill_late(process)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="instep start of a rank", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() <= until:
        thread.join(min(REVIVE_S, seconds))
        if thread.is_alive():
            _revive()
    if thread.is_alive():
        given_up.set()
        if started.is_set():  # either side sees that of the other
            _kill_late(process)
        raise TimeoutError(f"the forkserver has started no process within {seconds:g} s")
    if errors:
        raise errors[0]


def _kill_late(process: ForkServerProcess) -> None:
    if process.pid is not None and process.pid > 0:  # mesh.forkserver
        process.kill()


def _revive() -> None:
    """Let the forkserver go on if it was stopped; a stop of the command itself stops this, too."""
    pid = _forkserver_pid()
    if pid is not None and (found := look(pid)) is not None and found[0] == "T":
        print(
            f"the forkserver (pid {pid}) was stopped: it goes on, as no rank starts or ends without it",
            file=sys.stderr,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _kill_forkserver() -> None:
    """End it, and all that it has started."""
    pid = _forkserver_pid()
    if pid is not None and not _has_ended(pid):
        print(
            f"the forkserver (pid {pid}) does not tell that a process has ended: killed, with all ranks",
            file=sys.stderr,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # another launcher's
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # or the next start would still ask it


def _forkserver_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def _has_ended(pid: int | None) -> bool:
    """Whether there is no process ``pid`` that runs; where there is no /proc, none is seen to have ended."""
    return pid is None or (look(pid) is None and look(os.getpid()) is not None)


def _forget(process: ForkServerProcess) -> None:
    """Of ``process`` there is nothing but the object, which multiprocessing would wait for at exit."""
    process._popen.returncode = 1  # type: ignore[attr-defined]
    process.close()


def _signal_group(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def surroundings(threads: int, place: Mapping[str, object]) -> dict[str, str]:
    """The environment of a rank at ``place``: this process's, with what a rank on this host needs."""
    needed = {
        # gloo listens even when ranks meet in a file: on loopback only.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    return {**os.environ, **{name: str(value) for name, value in {**needed, **place}.items()}}


def _place(rank: int, ranks: int, store: MemoryFile) -> dict[str, object]:
    return {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "INSTEP_STORE": store.path,  # this process has it for as long as there is a rank
    }


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _terminate_unwinds() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``SystemExit`` in the block, so that it cleans up as after an exception.

    A program that has handlers of its own, or ignores them, keeps that; so does a launch in a thread.
    """

    def unwind(number: int) -> None:
        raise SystemExit(128 + number)

    with handled([signal.SIGTERM, signal.SIGHUP], unwind):
        yield


@contextmanager
def _ignored() -> Iterator[None]:
    """What is started in the block ignores Ctrl-C, and what ends a run politely, from its first instruction.

    Those signals may be sent to every process of a job; if the forkserver ended, so would all ranks.
    """
    before = {}
    if _in_main_thread():
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _passing_directory() -> Iterator[None]:
    """The forkserver's socket has a name only in the block, and is reached by a descriptor after it.

    A cleaner of temporary files could remove the name, and then no rank could be started. Names of sockets
    are short, so a long name of the temporary directory is passed over.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    short = len(tempfile.gettempdir()) <= LONGEST_PATH
    with tempfile.TemporaryDirectory(prefix="instep-", dir=None if short else "/tmp") as directory:
        config["tempdir"] = directory
        try:
            yield
        finally:
            config["tempdir"] = before
        _hold_address()


def _hold_address() -> None:
    server = multiprocessing.forkserver._forkserver
    address: str = server._forkserver_address  # type: ignore[attr-defined]
    if address.startswith("\0"):
        raise RuntimeError(
            "this program has started multiprocessing's forkserver, which in Python 3.11.0 unpickles what "
            "any user of this host sends to it (CVE-2022-42919): use Python 3.11.1 or later"
        )
    if not address.startswith(HELD):
        for old in _held:
            os.close(old)
        _held[:] = [os.open(address, os.O_PATH | os.O_CLOEXEC)]
        server._forkserver_address = f"{HELD}{_held[0]}"  # type: ignore[attr-defined]


@contextmanager
def _socket_with_a_file() -> Iterator[None]:
    """What is started in the block listens in a directory of this user's.

    In Python 3.11.0 a forkserver's socket would have a name without a file, to which any user of the host can
    connect (CVE-2022-42919). Later ones do not ask for this switch.
    """
    before = getattr(multiprocessing.util, "abstract_sockets_supported", False)
    multiprocessing.util.abstract_sockets_supported = False  # type: ignore[misc]
    try:
        yield
    finally:
        multiprocessing.util.abstract_sockets_supported = before  # type: ignore[misc]


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
