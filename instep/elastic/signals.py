"""Signals that ask a run to end: the first one politely, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from instep.mesh.child import POLITE


@contextmanager
def preempted(ask: Callable[[str], None]) -> Iterator[None]:
    """In the block the first SIGTERM or SIGUSR1 calls ``ask`` with its name; a second one, or SIGHUP, raises
    ``SystemExit``. Handlers that a program has set itself stay."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or number == signal.SIGHUP:
            for other in taken:
                signal.signal(other, signal.SIG_IGN)  # cleaning up is not interrupted by a third one
            raise SystemExit(128 + number)
        asked = True
        ask(signal.Signals(number).name)

    taken = _free([*POLITE, signal.SIGHUP])
    try:
        for number in taken:
            signal.signal(number, handle)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def listen(ask: Callable[[str], None]) -> None:
    """In a rank: the first SIGTERM or SIGUSR1 calls ``ask``, a second one ends the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        ask(signal.Signals(number).name)

    taken = _free(POLITE)
    for number in taken:
        signal.signal(number, handle)


def _free(numbers: tuple[signal.Signals, ...] | list[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that nobody handles, none outside of the main thread, where nobody may."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
