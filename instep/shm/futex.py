"""Sleeping in the kernel until another process changes a word of shared memory.

A flag that is polled costs nothing to set and burns a core to wait for; with more ranks than cores the burnt
core is the one that the awaited rank needs. Here a waiter polls for some microseconds and then sleeps on the
address of the word. The kernel compares the word once more before it lets the waiter sleep, so a change in
between is never missed. The writer always wakes: to ask first whether a process sleeps would need a fence
between its store and that question, and Python has none.

Words have one writer each and only grow. That is enough on x86-64, whose stores become visible in the order
in which they were made; data written before a word is there when the word is. Other processors need loads and
stores that keep their order, which Python does not have: there every access is one of the native core.

Linux, ``futex(2)``.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

from instep.native import build
from instep.native.library import Core, absence, core

NEEDED = "it needs Linux on x86-64, or on aarch64 with the native core"
_SYS_FUTEX = 202  # on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without the flag that would make them private to one process
_EVERYBODY = 0x7FFFFFFF
_LOW_HALF = 0xFFFFFFFF
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def available() -> bool:
    """Whether this platform is one that all of this is written for."""
    return sys.platform == "linux" and (_keeps_order() or core() is not None)


def why_not() -> str:
    """Why shared memory is not ``available`` here, or ""."""
    if available():
        return ""
    here = f"{NEEDED}, and this is {platform.system()} on {platform.machine()}"
    return here if platform.machine() not in build.MACHINES else f"{here}, where {absence()}"


def words_at(memory: memoryview, address: int) -> Words:
    """``memory`` as words, in the way that this processor needs."""
    native = core()
    return (
        Words(memory, address) if _keeps_order() or native is None else OrderedWords(memory, address, native)
    )


def _keeps_order() -> bool:
    return platform.machine() == "x86_64"


class Words:
    """``memory`` (writable, at ``address``) as 64-bit words; ``words[i]`` is one atomic load or store.

    A word's own cache line is the caller's care.
    """

    def __init__(self, memory: memoryview, address: int) -> None:
        self.address = address
        self._words = memory.cast("q")
        self._futex = ctypes.CDLL(None, use_errno=False).syscall

    def __getitem__(self, i: int) -> int:
        return self._words[i]

    def __setitem__(self, i: int, value: int) -> None:
        self._words[i] = value

    def post(self, i: int, value: int) -> None:
        """Store ``value`` in word i and wake all that sleep on it."""
        self[i] = value
        self.wake(i)

    def wake(self, i: int) -> None:
        """Let all that sleep on word i look again."""
        self._futex(_SYS_FUTEX, ctypes.c_void_p(self.address + 8 * i), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def spin(self, i: int, target: int, seconds: float) -> bool:
        """Poll word i until it is at least ``target``, for ``seconds`` at most; whether it is."""
        if self[i] >= target:
            return True
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if self[i] >= target:
                return True
        return self[i] >= target

    def sleep(self, i: int, target: int, seconds: float) -> None:
        """Sleep until word i changes or is woken, ``seconds`` at most; not at all if it is at ``target``."""
        value = self[i]
        if value >= target or seconds <= 0:
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * _NS))
        self._futex(
            _SYS_FUTEX,
            ctypes.c_void_p(self.address + 8 * i),
            _FUTEX_WAIT,
            ctypes.c_uint32(value & _LOW_HALF),  # the half at the address, on a little-endian machine
            ctypes.byref(limit),
            None,
            0,
        )


class OrderedWords(Words):
    """Words for processors that reorder: every load and store keeps its place among the others.

    ``memory`` is kept alive, as in ``Words``.
    """

    def __init__(self, memory: memoryview, address: int, native: Core) -> None:
        super().__init__(memory, address)
        self._native = native

    def __getitem__(self, i: int) -> int:
        return self._native.load(self.address + 8 * i)

    def __setitem__(self, i: int, value: int) -> None:
        self._native.store(self.address + 8 * i, value)

    def wake(self, i: int) -> None:
        self._native.wake(self.address + 8 * i)

    def spin(self, i: int, target: int, seconds: float) -> bool:
        return bool(self._native.spin(self.address + 8 * i, target, int(seconds * _NS)))

    def sleep(self, i: int, target: int, seconds: float) -> None:
        self._native.sleep(self.address + 8 * i, target, int(seconds * _NS))
