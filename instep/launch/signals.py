"""Signals that ask a run to end; handlers that the program sets itself stay.

A job is preempted with SIGTERM or SIGUSR1: the first one asks politely, for a checkpoint after the step; the
second one ends the process at once.

A process inherits which signals are ignored. SIGINT and SIGHUP stay ignored: a shell ignores SIGINT in the
background jobs of a script, ``nohup`` SIGHUP, and both mean it. SIGTERM and SIGUSR1 do not: a parent that
ignores them means itself, and a run that cannot be preempted loses its last steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # which ask a run to end


def hear_stop_signals() -> None:
    """At the start of a command: accept SIGTERM and SIGUSR1, even if its parent ignored or blocked them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def handled(numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """In the block ``handle`` is called for ``numbers`` that the program neither handles nor ignores.

    If it raises ``SystemExit``, further signals do not interrupt the cleaning up.
    """
    taken = _unhandled(numbers)

    def called(number: int, frame: FrameType | None) -> None:
        try:
            handle(number)
        except SystemExit:
            for other in taken:
                signal.signal(other, signal.SIG_IGN)
            raise

    try:
        for number in taken:
            signal.signal(number, called)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def preempted(ask: Callable[[str], None]) -> Iterator[None]:
    """In the block the first SIGTERM or SIGUSR1 calls ``ask`` with its name.

    A second one, or SIGHUP, raises ``SystemExit``.
    """
    asked = False

    def handle(number: int) -> None:
        nonlocal asked
        if asked or number == signal.SIGHUP:
            raise SystemExit(128 + number)
        asked = True
        ask(signal.Signals(number).name)

    with handled([*STOP_SIGNALS, signal.SIGHUP], handle):
        yield


def listen_for_preemption(ask: Callable[[str], None]) -> Callable[[], None]:
    """In a rank: the first SIGTERM or SIGUSR1 calls ``ask``, a second one ends the process.

    The returned function stops listening: the signals end the process again, except those that the program
    handles by then.
    """

    def end_now(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    def handle(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, end_now)
        ask(signal.Signals(number).name)

    def stop() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in taken:
                if signal.getsignal(number) in (handle, end_now):
                    signal.signal(number, signal.SIG_DFL)

    taken = _unhandled(STOP_SIGNALS)
    for number in taken:
        signal.signal(number, handle)
    return stop


def _unhandled(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
