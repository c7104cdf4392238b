"""StoreClient to a store that may be lost: asked in a thread, and waited for no longer than a second.

A store is asked in native code, and one whose host is gone, or that is behind a cut network, keeps its caller
for the store's own deadline, minutes. So a thread asks, and is left alone at the end of what it may take.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from instep.work import Lane, Work

PATIENCE_S = 1.0  # at most, for a store that the world met in
T = TypeVar("T")

_unanswered: list[Work] = []


def patience_s(timeout_s: float) -> float:
    """For an answer of a store, on the way to an error of an operation that may take ``timeout_s``."""
    return min(PATIENCE_S, timeout_s / 10)


class StoreClient:
    """To one store: each is waited for no longer than ``patience_s``.

    A store that has not answered is asked nothing more until it has. ``rank`` is who asks.
    """

    def __init__(self, rank: int, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._lane = Lane(f"instep questions to a store, rank {rank}")
        self._asked: Work | None = None

    def try_call(self, question: Callable[[], T]) -> T | None:
        """What the store answers; None where it fails, or takes longer than it may."""
        with suppress(Exception):
            return self.call(question)
        return None

    def call(self, question: Callable[[], T]) -> T:
        """What the store answers.

        Raises:
            TimeoutError: it takes longer than it may, or has not answered what was asked before.
            RuntimeError: no thread can be started.
            what ``question`` raises.
        """
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)

        if self._asked is None or self._asked.done():
            self._asked = self._lane.submit("a question to a store", run)
            if self._asked.arrive(self.patience_s):
                return answers.pop() if answers else _raise(errors)
            _unanswered.append(self._asked)
        raise TimeoutError(f"no answer from the store within {self.patience_s:g} s")

    def close(self) -> None:
        """Let the thread end, when it has its answer; the next question starts another one."""
        self._lane.close(wait=False)


def call_once(rank: int, patience_s: float, question: Callable[[], T]) -> T:
    """``StoreClient.call`` to one question, of which the thread ends with it."""
    client = StoreClient(rank, patience_s)
    try:
        return client.call(question)
    finally:
        client.close()


@atexit.register
def _keep_exit_code() -> None:
    """Let a question that is answered while the interpreter goes not turn the exit code into that of SIGABRT.

    A thread that comes back from native code then is ended by force, which C++ answers with ``abort``. It
    cannot be woken before, nor be kept from coming back; but it can sleep, as many seconds as the signal's
    number says, while the main thread ends. An abort of the main thread's own is as much later, and a SIGABRT
    from outside, which looks the same, does no more than that; SIGTERM and SIGKILL are what they were.
    """
    if any(not asked.done() for asked in _unanswered):
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _raise(errors: list[Exception]) -> NoReturn:
    raise errors.pop()  # a list that kept it would hold, by its traceback, all that the question held
