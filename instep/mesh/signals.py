"""Handlers for signals that a program has not taken for itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

POLITE = (signal.SIGTERM, signal.SIGUSR1)  # which ask a run to end


def free(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that have no handler and are not ignored; none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]


@contextmanager
def handled(numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """In the block those of ``numbers`` that are ``free`` call ``handle``.

    If it raises ``SystemExit``, what cleans up after that is not interrupted by another one.
    """
    taken = free(numbers)

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
