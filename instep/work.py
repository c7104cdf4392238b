"""Work that goes on beside the computation, strictly in the order in which it was given.

Backends match operations by the order in which ranks issue them: two equal-sized exchanges swapped on one
rank give wrong numbers and no error. A wrapper therefore owns one ``Lane``, one thread that runs what it
is given in that order, and everything of the wrapper that communicates goes through it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta

from torch.autograd import profiler

from instep.errors import InstepError, PeerLost, clear_tracebacks


class Refused(RuntimeError):
    """A lane that has failed, or is closed, does nothing more."""


class Work:
    """One thing under way: not begun, running, done, or failed with ``error``.

    Its bare lock takes a tenth of the time of a ``threading.Event``, also to wake a thread.
    """

    __slots__ = ("_lock", "awaited", "ended_ns", "error", "happened", "operation")

    def __init__(self, operation: str, awaited: bool = True) -> None:
        self.operation, self.awaited = operation, awaited
        self.error: BaseException | None = None
        self.ended_ns = 0
        self.happened = False  # it has ended, well or not
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> bool:
        return self.happened

    def arrive(self, timeout_s: float | None = None) -> bool:
        """Block until done, ``timeout_s`` at most; whether it is."""
        timeout = -1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        if not self.happened and self._lock.acquire(timeout=timeout):
            self._lock.release()
        return self.happened

    def wait(self, deadline: float | None = None) -> None:
        """Block until done, then raise ``error`` if there is one.

        ``deadline`` is a ``time.monotonic()`` value in seconds; past it ``PeerLost`` names the operation.
        """
        timeout_s = None if deadline is None else deadline - time.monotonic()
        if not self.happened and not self.arrive(timeout_s):
            raise PeerLost(f"{self.operation} did not end before its deadline", operation=self.operation)
        if isinstance(self.error, InstepError):  # it says all, and has the frames of all who have raised it
            raise self.error.with_traceback(None)
        if self.error is not None:
            raise self.error

    def reason(self) -> BaseException:
        """Why it failed, to be raised: ``error``, or of a lost peer what the backend has said.

        A copy: an error keeps the frames that it is raised through, those hold this work, and this the error.
        """
        assert self.error is not None
        if not isinstance(self.error, PeerLost):
            return _again(self.error).with_traceback(self.error.__traceback__)
        clear_tracebacks(self.error)  # if the lane was idle, it ran in the thread that waits
        return _again(self.error.__cause__ or self.error)

    def end(self, error: BaseException | None = None) -> None:
        """The work has ended; threads that wait for it go on."""
        self.error, self.ended_ns = error, time.monotonic_ns()
        if not self.happened:
            self.happened = True
            self._lock.release()


@dataclass
class _State:
    """What a lane's functions share, so that they need not know the lane."""

    profiled_as: str
    failed: BaseException | None = None
    closed: BaseException | None = None  # what stands for a failure, once the lane is closed
    running: threading.Lock = field(default_factory=threading.Lock)
    runner: int = 0  # the thread that executes a function in ``Lane.run``; 0: none does
    server: int = 0  # the lane's own

    def fail(self, error: BaseException) -> None:
        self.failed = error
        if self.closed is not None:  # by another thread, perhaps at this moment: each looks after it has set
            self.failed = self.closed

    def close(self, error: BaseException) -> None:
        self.closed = error
        if self.failed is not None:
            self.failed = error


def _again(error: BaseException) -> BaseException:
    """A copy of ``error``, with the same cause; itself, if it cannot be made of what it says."""
    try:
        again = copy(error)
    except TypeError:
        return error
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again


_NOTHING = nullcontext()
Item = tuple[Work, Callable[[], object], _State]


class Handle:
    """Work of a lane in the form of a backend's."""

    def __init__(self, work: Work) -> None:
        self._work = work

    @property
    def failed_here(self) -> bool:
        """Whether it failed in this process, say for want of memory: what a backend says is ``PeerLost``."""
        error = self._work.error
        return error is not None and not isinstance(error, PeerLost | Refused)

    def is_completed(self) -> bool:
        return self._work.done()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """``TimeoutError`` after a while; the backend's own error, if that is why it failed."""
        if not self._work.arrive(timeout.total_seconds()):
            raise TimeoutError
        if self._work.error is not None:
            raise self._work.reason()
        return True


class Lane:
    """One thread that executes functions in the order they were submitted.

    After the first failure everything that is still queued fails with the same error, because what
    follows a missing exchange would pair with another one of the peers; ``reset`` opens the lane again.
    ``inline`` runs everything in the caller: a world of one has no rank to wait for.

    A running torch.profiler is told what is handed over and what is executed (``profiled_as``: "exchange" or
    "compute", "" for neither). It records the thread only if it was made to record all threads; without
    that, ``timeline/profiler.py`` finds the one without the other.
    """

    def __init__(self, name: str, *, inline: bool = False, profiled_as: str = "") -> None:
        self.name = name
        self.inline = inline
        self._state = _State("" if inline else profiled_as)
        self._lock = threading.Lock()  # of the order: what was submitted last
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None

    @property
    def failed(self) -> BaseException | None:
        """What the first failed function raised, until ``reset``."""
        return self._state.failed

    def submit(self, operation: str, function: Callable[[], object], *, awaited: bool = True) -> Work:
        """Queue ``function``; it begins when everything before it has ended.

        Not ``awaited``: no thread will wait for it, so what it raises fails the lane, without a traceback.
        """
        with self._lock:
            if not self.inline:
                self._begin()
            work = self._last = Work(operation, awaited)
            if not self.inline:
                with _told_to_profiler("hand over", work, self._state):
                    self._queue.put((work, function, self._state))
                return work
        _run(work, function, self._state)
        return work

    def run(self, operation: str, function: Callable[[], object]) -> Work:
        """Execute ``function`` here if nothing is queued, else in its turn; it has ended on return.

        Raises:
            RuntimeError: called by a function of the lane, which would wait for itself.
        """
        if threading.get_ident() in (self._state.runner, self._state.server):
            raise RuntimeError(
                f"{operation} was called by what runs on {self.name!r}: it cannot wait for itself"
            )
        with self._lock:
            idle = self._last is None or self._last.happened
            if idle:
                self._state.running.acquire()  # free at once: what was last has ended
                work = self._last = Work(operation)
        if idle:
            self._state.runner = threading.get_ident()
            try:
                _run(work, function, self._state)
            finally:
                self._state.runner = 0
                self._state.running.release()
                if not work.happened:  # interrupted before it began
                    work.end(Refused(f"{operation} was interrupted"))
            return work
        work = self.submit(operation, function)
        work.arrive()
        return work

    def settle(self) -> BaseException | None:
        """Wait for everything submitted, and forget a failure that is no lost rank: else return it."""
        if self._last is not None and not self._last.happened:
            self.drain()
        if self._state.failed is not None and not isinstance(self._state.failed, PeerLost):
            self._state.failed = None
        return self._state.failed

    def reset(self) -> None:
        """Accept work again after a failure, once what was queued has been refused."""
        self.drain()
        self._state.failed = None

    def drain(self) -> None:
        """Block until everything submitted has ended, whether it failed or not."""
        if self._last is not None:
            self._last.arrive()

    def _begin(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=_serve, args=(self._queue,), name=self.name, daemon=True)
            thread.start()  # which raises where the system has no room for another one
            self._thread, self._state.closed = thread, None
            self._state.server = thread.ident or 0
            weakref.finalize(self, self._queue.put, None)

    def close(self, *, wait: bool = True) -> None:
        """End the thread after what is queued; without ``wait`` whenever that may be.

        A lane that has failed stays so, and forgets with what, also if it fails while it ends: the error's
        traceback holds what it worked on.
        """
        if self._thread is not None:
            self._queue.put(None)
            # The current thread may be the lane's own, collecting the lane's owner.
            if wait and self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        self._last = None
        self._state.close(Refused(f"{self.name!r} has failed, and is closed"))


def _run(work: Work, function: Callable[[], object], state: _State) -> None:
    """Call ``function``, or refuse to, and keep what it raised for the thread that waits."""
    error = state.failed
    if error is None:
        try:
            if state.profiled_as and profiler._is_profiler_enabled:
                with _told_to_profiler(state.profiled_as, work, state):
                    function()
            else:
                function()
        except Exception as raised:
            error = raised
            if not work.awaited:
                clear_tracebacks(
                    error
                )  # its frames hold the works that it went through, and these hold the error
            state.fail(error)
        except BaseException as raised:  # meant for this work alone; but what follows cannot be done either
            error = raised
            state.fail(Refused(f"{work.operation} was interrupted: {raised!r}"))
    work.end(error)  # last: a thread that waited finds the lane failed, and can reset it
    del work, function, state, error  # the error's traceback has this frame, and all of these hold the error


def _told_to_profiler(what: str, work: Work, state: _State) -> AbstractContextManager[object]:
    if not (state.profiled_as and profiler._is_profiler_enabled):
        return _NOTHING
    return profiler.record_function(f"instep:{what} {work.operation}")


def _serve(pending: queue.SimpleQueue[Item | None]) -> None:
    while (item := pending.get()) is not None:
        with item[2].running:
            _run(*item)
        # The function, or the traceback of its error, holds the lane's owner, which must be free to go.
        del item
