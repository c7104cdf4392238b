"""A lane: one thread that runs submitted functions beside the computation, strictly in order.

Backends match operations by the order in which ranks issue them: if one rank swaps two exchanges of equal
size, the numbers are wrong and no error is raised. Therefore all communication of a wrapper goes through its
one ``Lane``.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta

from torch.autograd import profiler

from instep.errors import InstepError, PeerLost, clear_tracebacks


class Refused(RuntimeError):
    """Work of a lane that has failed or is closed."""


class Work:
    """One submitted function: queued, running, done, or failed with ``error``.

    A bare lock takes a tenth of the time of a ``threading.Event``, also to wake a thread.
    """

    __slots__ = ("_lock", "awaited", "error", "happened", "operation")

    def __init__(self, operation: str, awaited: bool = True) -> None:
        self.operation, self.awaited = operation, awaited
        self.error: BaseException | None = None
        self.happened = False  # done or failed
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> bool:
        return self.happened

    def arrive(self, timeout_s: float | None = None) -> bool:
        """Block until done, for at most ``timeout_s``; return whether it is done."""
        timeout = -1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        if not self.happened and self._lock.acquire(timeout=timeout):
            self._lock.release()
        return self.happened

    def wait(self) -> None:
        """Block until done, then raise ``error`` if there is one."""
        if not self.happened:
            self.arrive()
        if isinstance(self.error, InstepError):  # complete without the frames of earlier raises
            raise self.error.with_traceback(None)
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """Mark as done, or as failed with ``error``, and wake the waiting threads."""
        self.error = error
        if not self.happened:
            self.happened = True
            self._lock.release()


@dataclass
class _State:
    """The state of a lane that its thread needs; a reference to the lane would keep the lane alive."""

    profiled_as: str
    failed: BaseException | None = None
    closed: BaseException | None = None  # replaces ``failed`` once the lane is closed
    running: threading.Lock = field(default_factory=threading.Lock)
    runner: int = 0  # id of the thread inside ``Lane.run``, or 0
    server: int = 0  # id of the lane's own thread

    def fail(self, error: BaseException) -> None:
        self.failed = error
        if self.closed is not None:  # ``Lane.close`` may run now: each thread writes first, then reads
            self.failed = self.closed


def _copy(error: BaseException) -> BaseException:
    """A copy of ``error`` with its cause, or ``error`` itself if its class cannot be copied."""
    try:
        new = copy(error)
    except TypeError:
        return error
    new.__cause__, new.__suppress_context__ = error.__cause__, error.__suppress_context__
    return new


Item = tuple[Work, Callable[[], object], _State]


class Handle:
    """Work of a lane with the interface of ``torch.distributed.Work``."""

    def __init__(self, work: Work) -> None:
        self._work = work

    @property
    def failed_here(self) -> bool:
        """Whether the function failed in this process, for example out of memory, and no peer is lost."""
        error = self._work.error
        return error is not None and not isinstance(error, PeerLost | Refused)

    def is_completed(self) -> bool:
        return self._work.done()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Raises ``TimeoutError``, or a copy of the error; if a peer is lost, of the backend's own error.

        A copy, because the traceback of the error itself would hold this work, which holds the error.
        """
        if not self._work.arrive(timeout.total_seconds()):
            raise TimeoutError
        if (error := self._work.error) is None:
            return True
        if not isinstance(error, PeerLost):
            raise _copy(error).with_traceback(error.__traceback__)
        clear_tracebacks(error)  # on an idle lane the function ran in the waiting thread
        raise _copy(error.__cause__ or error)


class Lane:
    """One thread that runs functions in the order of their submission.

    After the first failure all queued work fails with the same error, because the next exchange would pair
    with another one of the peers; ``reset`` reopens the lane. ``inline`` runs everything in the caller's
    thread: a world of one has no rank to wait for.

    A running torch.profiler records "hand over" for a submission and ``profiled_as`` ("exchange"; "" for
    neither) for the run, the latter only if it records all threads (``timeline/profiler.py``).
    """

    def __init__(self, name: str, *, inline: bool = False, profiled_as: str = "") -> None:
        self.name = name
        self.inline = inline
        self._state = _State("" if inline else profiled_as)
        self._lock = threading.Lock()  # of the order of submission
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None

    @property
    def failed(self) -> BaseException | None:
        """The first error, until ``reset``."""
        return self._state.failed

    def submit(self, operation: str, function: Callable[[], object], *, awaited: bool = True) -> Work:
        """Queue ``function``.

        Not ``awaited``: no thread waits for it, so its error fails the lane, without a traceback.
        """
        state = self._state
        with self._lock:
            if self._thread is None and not self.inline:
                thread = threading.Thread(target=_serve, args=(self._queue,), name=self.name, daemon=True)
                thread.start()  # raises if the system has no room for another thread
                self._thread, state.closed, state.server = thread, None, thread.ident or 0
                weakref.finalize(self, self._queue.put, None)
            work = self._last = Work(operation, awaited)
            if not self.inline:
                if state.profiled_as and profiler._is_profiler_enabled:
                    with profiler.record_function(f"instep:hand over {operation}"):
                        self._queue.put((work, function, state))
                else:
                    self._queue.put((work, function, state))
                return work
        _run(work, function, state)
        return work

    def run(self, operation: str, function: Callable[[], object]) -> Work:
        """Run ``function`` in this thread if the lane is idle, else queue it and wait.

        Raises:
            RuntimeError: called inside a function of the lane, which would wait for itself.
        """
        if threading.get_ident() in (self._state.runner, self._state.server):
            raise RuntimeError(
                f"{operation} was called inside a function of lane {self.name!r}, which would wait for itself"
            )
        with self._lock:
            idle = self._last is None or self._last.happened
            if idle:
                self._state.running.acquire()  # without waiting: the last work has ended
                work = self._last = Work(operation)
        if idle:
            self._state.runner = threading.get_ident()
            try:
                _run(work, function, self._state)
            finally:
                self._state.runner = 0
                self._state.running.release()
                if not work.happened:  # interrupted before ``_run``
                    work.end(Refused(f"{operation} was interrupted"))
            return work
        work = self.submit(operation, function)
        work.arrive()
        return work

    def settle(self) -> BaseException | None:
        """Wait for all submitted work, clear a failure unless it is a lost rank, and return ``failed``."""
        if self._last is not None and not self._last.happened:
            self._last.arrive()
        if self._state.failed is not None and not isinstance(self._state.failed, PeerLost):
            self._state.failed = None
        return self._state.failed

    def reset(self) -> None:
        """Accept work again after a failure, once all queued work has been refused."""
        self.drain()
        self._state.failed = None

    def drain(self) -> None:
        """Block until all submitted work is done or failed."""
        if self._last is not None:
            self._last.arrive()

    def close(self, *, wait: bool = True) -> None:
        """End the thread after all queued work; ``wait`` for the end.

        A lane that has failed stays failed, but drops the error, whose traceback holds the objects in use.
        """
        if self._thread is not None:
            self._queue.put(None)
            # The current thread may be the lane's own, collecting the lane's owner.
            if wait and self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        self._last = None
        self._state.closed = Refused(f"{self.name!r} has failed, and is closed")
        if self._state.failed is not None:
            self._state.failed = self._state.closed


def _run(work: Work, function: Callable[[], object], state: _State) -> None:
    """Call ``function``, or refuse to, and keep its error for the waiting thread."""
    error = state.failed
    if error is None:
        try:
            if state.profiled_as and profiler._is_profiler_enabled:
                with profiler.record_function(f"instep:{state.profiled_as} {work.operation}"):
                    function()
            else:
                function()
        except Exception as raised:
            error = raised
            if not work.awaited:
                clear_tracebacks(error)  # whose frames hold the work, which holds the error
            state.fail(error)
        except BaseException as raised:  # an interrupt of this work; later work gets another error
            error = raised
            state.fail(Refused(f"{work.operation} was interrupted: {raised!r}"))
    work.end(error)  # last, so that a waiting thread finds the lane failed and can reset it
    del work, function, state, error  # the error's traceback holds this frame


def _serve(pending: queue.SimpleQueue[Item | None]) -> None:
    while (item := pending.get()) is not None:
        with item[2].running:
            _run(*item)
        # The function, or the traceback of its error, would keep the lane's owner alive.
        del item
