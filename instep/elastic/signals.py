"""Signals that ask a run to end: the first one politely, the second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from instep.mesh.signals import POLITE, free, handled


@contextmanager
def preempted(ask: Callable[[str], None]) -> Iterator[None]:
    """In the block the first SIGTERM or SIGUSR1 calls ``ask`` with its name; a second one, or SIGHUP, raises
    ``SystemExit``. Handlers that a program has set itself stay."""
    asked = False

    def handle(number: int) -> None:
        nonlocal asked
        if asked or number == signal.SIGHUP:
            raise SystemExit(128 + number)
        asked = True
        ask(signal.Signals(number).name)

    with handled([*POLITE, signal.SIGHUP], handle):
        yield


def listen(ask: Callable[[str], None]) -> None:
    """In a rank: the first SIGTERM or SIGUSR1 calls ``ask``, a second one ends the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        for other in taken:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        ask(signal.Signals(number).name)

    taken = free(POLITE)
    for number in taken:
        signal.signal(number, handle)
