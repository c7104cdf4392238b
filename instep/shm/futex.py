"""64-bit words of shared memory on which other processes sleep in the kernel.

Polling a flag burns a core; with more ranks than cores, that is the core the awaited rank needs. So a waiter
polls for some microseconds, then sleeps on the address of the word (``futex(2)``). The kernel compares the
word once more before it lets the waiter sleep, so no change in between is missed.

Each word has one writer and only grows. Loads and stores are those of the native core, which orders them on
every processor: data written before a word is visible to whoever sees the word.
"""

from __future__ import annotations

from instep.native.library import absence, core

_NS = 1_000_000_000


def available() -> bool:
    """Whether ranks can share memory here."""
    return not why_not()


def why_not() -> str:
    """Why ranks cannot share memory here, or ""."""
    return f"shm needs Linux and the native core: {absence()}" if core() is None else ""


class Words:
    """Memory at ``address`` as 64-bit words; ``words[i]`` is one atomic load or store.

    ``memory`` is kept alive. Words that different ranks write belong on different cache lines.
    """

    def __init__(self, memory: object, address: int) -> None:
        native = core()
        assert native is not None, "checked by why_not()"
        self.address = address
        self._memory, self._native = memory, native

    def __getitem__(self, i: int) -> int:
        return self._native.load(self.address + 8 * i)

    def __setitem__(self, i: int, value: int) -> None:
        self._native.store(self.address + 8 * i, value)

    def post(self, i: int, value: int) -> None:
        """Store ``value`` in word i and wake all sleepers."""
        self[i] = value
        self.wake(i)

    def wake(self, i: int) -> None:
        """Wake all that sleep on word i."""
        self._native.wake(self.address + 8 * i)

    def spin(self, i: int, target: int, seconds: float) -> bool:
        """Poll word i for at most ``seconds``; whether it reached ``target``."""
        return bool(self._native.spin(self.address + 8 * i, target, int(seconds * _NS)))

    def sleep(self, i: int, target: int, seconds: float) -> None:
        """Sleep until word i changes or is woken, at most ``seconds``; not if it is at ``target`` already."""
        self._native.sleep(self.address + 8 * i, target, int(seconds * _NS))
