"""Signals that ask a run to end; handlers that the program sets itself stay.

A job is preempted with SIGTERM or SIGUSR1: the first one asks politely, for a checkpoint after the step; the
second one ends the process at once.

A process inherits which signals are ignored. SIGINT and SIGHUP stay ignored: a shell ignores SIGINT in the
background jobs of a script, ``nohup`` SIGHUP, and both mean it. SIGTERM and SIGUSR1 do not: a parent that
ignores them means itself, and a run that cannot be preempted loses its last steps.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # which ask a run to end
GRACE_S = 60.0  # for a rank to end, of processes that serve it
_of_this_process: set[Any] = set()  # handlers that a child has no use for


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
    _of_this_process.update((handle, end_now))
    return stop


def _as_before() -> None:
    """In a forked child, which a stop signal ends."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in _of_this_process:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_as_before)


def outlive_stop_signals(grace_s: float = GRACE_S) -> None:
    """In a process that serves a rank: a stop signal, which a scheduler sends to all of a job, is the rank's.

    This process ends ``grace_s`` after the first one, or at once by a second: also while it computes in
    native code. What it starts itself hears signals as ever.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    for number in STOP_SIGNALS:
        signal.signal(number, _nothing)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(heard, grace_s), name="stop signals", daemon=True).start()


def _end_in_time(heard: int, grace_s: float) -> None:
    until: float | None = None
    while True:
        wait_s = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([heard], [], [], wait_s)[0]:
            break
        if os.read(heard, 1)[0] in STOP_SIGNALS:
            if until is not None:
                break
            until = time.monotonic() + grace_s
    os._exit(128 + signal.SIGTERM)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python writes the number of a signal that has a handler to ``set_wakeup_fd``."""


def _unhandled(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
