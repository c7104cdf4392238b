"""The signals of a terminal, for what a test starts, where the tests themselves ignore them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


@contextmanager
def default_signals() -> Iterator[None]:
    """A program that is started in the block ignores no signal of a terminal.

    It would inherit that where pytest is run in the background of a script, or under ``nohup``. A handler is
    not inherited, so each of them gets one that does nothing, and pytest goes on ignoring them.
    """
    ignored = [number for number in OF_A_TERMINAL if signal.getsignal(number) is signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(number, lambda number, frame: None)
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
