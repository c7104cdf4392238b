"""Calls of a store that may be unreachable: each runs in a thread and has a deadline.

A store is called in native code, and a store on a dead host, or behind a cut network, blocks its caller for
the store's own deadline, minutes. So a thread makes the call, and is abandoned at the caller's deadline.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from instep.work import Once

PATIENCE_S = 1.0  # for one answer, on the way to an error
T = TypeVar("T")

_unanswered: list[Once] = []


class StoreClient:
    """Calls of one store by ``rank``; none is made before the last one has its answer."""

    def __init__(self, rank: int) -> None:
        self._name = f"instep store client, rank {rank}"
        self._answered: Once | None = None  # of the last call

    def call(self, function: Callable[[], T], patience_s: float | None = None) -> T:
        """``function()``, which calls the store, within ``patience_s`` (by default ``PATIENCE_S``).

        Raises:
            TimeoutError: there is no answer in time, or still none to the call before.
            RuntimeError: no thread can be started.
            the error of ``function``.
        """
        limit_s = PATIENCE_S if patience_s is None else patience_s
        answers: list[T] = []
        errors: list[Exception] = []
        answered = Once()

        def run() -> None:
            try:
                answers.append(function())
            except Exception as error:
                errors.append(error)
            answered.set()

        if self._answered is None or self._answered.happened:
            threading.Thread(target=run, name=self._name, daemon=True).start()
            self._answered = answered
            if answered.wait(limit_s):
                return answers.pop() if answers else _raise(errors)
            _unanswered.append(answered)
        raise TimeoutError(f"no answer from the store within {limit_s:g} s")


@atexit.register
def _keep_exit_code() -> None:
    """Keep an answer during interpreter exit from turning the exit code into that of SIGABRT.

    A thread that returns from native code then is ended by force, which C++ answers with ``abort``. Nothing
    can wake or stop the thread before; but its handler of SIGABRT can sleep, as many seconds as the signal's
    number says, while the main thread ends. An abort of the main thread, and a SIGABRT from outside, which
    looks the same, are delayed as much; SIGTERM and SIGKILL are not.
    """
    if not all(answered.happened for answered in _unanswered):
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _raise(errors: list[Exception]) -> NoReturn:
    raise errors.pop()  # a list that kept it would keep, by its traceback, everything that the call used
