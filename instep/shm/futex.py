"""Words of shared memory that other processes wait for, asleep in the kernel.

A flag that is polled costs nothing to set and burns a core to wait for; with more ranks than cores the burnt
core is the one that the awaited rank needs. Here a waiter polls for some microseconds and then sleeps on the
address of the word (``futex(2)``). The kernel compares the word once more before it lets the waiter sleep, so
a change in between is never missed.

Words have one writer each and only grow. Every load and store is one of the native core, which keeps their
order on processors that reorder: data written before a word is there when the word is.
"""

from __future__ import annotations

import platform
import sys

from instep.native import build
from instep.native.library import Core, absence, core

_NS = 1_000_000_000


def available() -> bool:
    """Whether ranks can share memory here."""
    return not why_not()


def why_not() -> str:
    """Why ranks cannot share memory here, or ""."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in build.MACHINES:
        needed = f"Linux on {' or '.join(build.MACHINES)}"
        return f"shm needs {needed}, and this is {platform.system()} on {machine}"
    return f"shm needs the native core: {absence()}" if core() is None else ""


class Words:
    """``memory`` (writable, at ``address``) as 64-bit words; ``words[i]`` is one atomic load or store.

    ``memory`` is kept alive. A word's own cache line is the caller's care.
    """

    def __init__(self, memory: memoryview, address: int) -> None:
        native = core()
        assert native is not None, "asked for where shared memory is available"
        self.address = address
        self._memory = memory
        self._native: Core = native

    def __getitem__(self, i: int) -> int:
        return self._native.load(self.address + 8 * i)

    def __setitem__(self, i: int, value: int) -> None:
        self._native.store(self.address + 8 * i, value)

    def post(self, i: int, value: int) -> None:
        """Store ``value`` in word i and wake all that sleep on it."""
        self[i] = value
        self.wake(i)

    def wake(self, i: int) -> None:
        """Let all that sleep on word i look again."""
        self._native.wake(self.address + 8 * i)

    def spin(self, i: int, target: int, seconds: float) -> bool:
        """Poll word i until it is at least ``target``, for ``seconds`` at most; whether it is."""
        return bool(self._native.spin(self.address + 8 * i, target, int(seconds * _NS)))

    def sleep(self, i: int, target: int, seconds: float) -> None:
        """Sleep until word i changes or is woken, ``seconds`` at most; not at all if it is at ``target``."""
        self._native.sleep(self.address + 8 * i, target, int(seconds * _NS))
