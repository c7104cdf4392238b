"""Where the time of computing threads goes: on a core, waiting for a core, or blocked.

    replica 0  |=Python=|~~operator~~|.....|=Python=|~~operator~~|      . blocked: the other has the lock
    replica 1  |........|=Python=|~~operator~~|.....|=Python=|~~~

The kernel counts the first two per thread. What is left, of a thread that neither sends nor reads nor awaits
anything, is spent for a lock of its process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from instep.events import Recorder

QUEUED = Path("/proc/thread-self/schedstat")  # time on a core, time in the queue for one, turns


class ThreadTimes(NamedTuple):
    """Seconds of one thread, or of several together."""

    computing: float = 0.0  # all of it
    on_core: float = 0.0
    for_core: float = 0.0  # 0 where the kernel does not count it

    @property
    def blocked(self) -> float:
        """Neither on a core nor for want of one."""
        return max(0.0, self.computing - self.on_core - self.for_core)

    def plus(self, other: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(*(now - then for now, then in zip(self, before, strict=True)))


def times_now() -> ThreadTimes:
    """Of the calling thread, since whenever; to be compared."""
    queued_ns = 0
    with suppress(OSError):
        queued_ns = int(QUEUED.read_text().split()[1])
    return ThreadTimes(time.perf_counter(), time.thread_time(), queued_ns / 1e9)


class ThreadClock(Recorder):
    """Adds up, beside what it records, the times of threads while they compute on lanes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()
        self._sum = ThreadTimes()

    @contextmanager
    def as_lane(self, lane: str) -> Iterator[None]:
        before = times_now()
        try:
            with super().as_lane(lane):
                yield
        finally:
            taken = times_now().since(before)
            with self._adding:
                self._sum = self._sum.plus(taken)

    def take(self) -> ThreadTimes:
        """The sum, which begins anew."""
        with self._adding:
            found, self._sum = self._sum, ThreadTimes()
        return found
