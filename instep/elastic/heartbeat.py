"""The heartbeat of every worker, in one page of memory that the supervisor and its workers share.

A heartbeat thread cannot tell whether a process makes progress: it beats on while the main thread loops, and
it misses when a builtin holds the interpreter lock. So here the main thread itself beats, with two stores at
each phase of a step, and within some, and the supervisor reads them without asking (``watchdog``). The same
page has what the supervisor wants of all workers.

    page   | stop, regroup, over, contract | fired faults | worker 0: phase, since, step, slowest | 1: ...

Every word has one writer at a time (stop and a fired fault are only ever set), so there are no locks. The
page is a file without a name, of the supervisor's; it ends with it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from instep.launch.memory_file import MemoryFile

# In the order of a step. Those that wait for other ranks cannot be the cause of a hang.
PHASES = (
    "start",
    "built",
    "spare",
    "join",
    "agree",
    "script",
    "data",
    "forward",
    "backward",
    "exchange",
    "loss",
    "update",
    "snapshot",
    "ledger",
    "hash",
    "evaluate",
    "gather",
    "save",
    "summary",
    "lost",
)
# How long these take depends on the size of the state and on the disk. What is done in them beats from
# inside, so here a time is that from one beat to the next.
BEATING = frozenset({"hash", "save"})
WAITING = frozenset({"built", "spare", "join", "agree", "exchange", "loss", "gather", "summary", "lost"})
# Of those, they do work of their own, too, which takes as long as there is to read or to write.
OWN_WORK = frozenset({"agree", "summary"})
# A user's own code: how long that takes says nothing of how long it may take.
UNLIMITED = frozenset({"script"})
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

MAX_WORKERS, MAX_FAULTS = 256, 64
_STOP, _REGROUP, _OVER, _CONTRACT, _FAULTS = 0, 1, 2, 3, 4
_PHASE, _SINCE, _STEP, _SLOWEST = 0, 1, 2, 3
_WIDTH = _SLOWEST + len(PHASES)
_FIRST = _FAULTS + MAX_FAULTS
_NUM_WORDS = _FIRST + MAX_WORKERS * _WIDTH


@dataclass(frozen=True)
class Position:
    """Where a worker is: in ``phase`` for ``seconds``, or so long after its last beat in it, with ``step``
    optimizer steps done (-1: not begun)."""

    phase: str
    seconds: float
    step: int


class HeartbeatPage:
    """The shared page in ``file``, which ``create`` makes and all others map."""

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        fd = file.open()
        try:
            self._memory = mmap.mmap(fd, 8 * _NUM_WORDS)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> HeartbeatPage:
        """A new one of this process, which closes its ``file``."""
        return HeartbeatPage(MemoryFile.create(8 * _NUM_WORDS))

    @property
    def stop(self) -> bool:
        """Whether the run shall end after the current step."""
        return bool(self._words[_STOP])

    @stop.setter
    def stop(self, wanted: bool) -> None:
        self._words[_STOP] = wanted

    @property
    def regroup(self) -> int:
        """The generation whose ranks shall leave their group, between two steps, to form another."""
        return self._words[_REGROUP]

    @regroup.setter
    def regroup(self, generation: int) -> None:
        self._words[_REGROUP] = generation

    @property
    def over(self) -> int:
        """The last generation that has lost a rank: those that still wait to join it need not."""
        return self._words[_OVER]

    @over.setter
    def over(self, generation: int) -> None:
        self._words[_OVER] = generation

    @property
    def contract(self) -> int:
        """What the run's bits depend on, as a number; 0 as long as no group has agreed on it. A process that
        has another number cannot take part."""
        return self._words[_CONTRACT]

    @contract.setter
    def contract(self, number: int) -> None:
        self._words[_CONTRACT] = number

    def fire(self, fault: int, after_ms: float = 0.0) -> bool:
        """Whether fault number ``fault`` has not been fired before; from now on it has."""
        first = not self._words[_FAULTS + fault]
        if first:
            self._words[_FAULTS + fault] = time.monotonic_ns() + int(after_ms * 1e6)
        return first

    def fired(self, fault: int) -> bool:
        """Whether fault number ``fault`` has been fired, and has come by now."""
        return 0 < self._words[_FAULTS + fault] <= time.monotonic_ns()

    @property
    def fired_ns(self) -> int:
        """When the last fault was fired, by ``time.monotonic_ns()``; 0 if none was."""
        return max(self._words[_FAULTS : _FAULTS + MAX_FAULTS].tolist())

    def enter(self, worker: int, phase: int) -> None:
        """``worker`` leaves its phase for number ``phase`` of ``PHASES``."""
        words, base, now = self._words, _base(worker), time.monotonic_ns()
        last = base + _SLOWEST + words[base + _PHASE]
        words[last] = max(words[last], now - words[base + _SINCE])
        words[base + _SINCE] = now
        words[base + _PHASE] = phase

    def beat(self, worker: int) -> None:
        """``worker`` makes progress in its phase."""
        self.enter(worker, self._words[_base(worker) + _PHASE])

    def excuse(self, worker: int) -> None:
        """``worker`` has been killed in its phase, which may take the next one as long."""
        base = _base(worker)
        last = base + _SLOWEST + self._words[base + _PHASE]
        self._words[last] = max(self._words[last], time.monotonic_ns() - self._words[base + _SINCE])

    def reset(self, worker: int) -> None:
        """A new process is ``worker``."""
        base = _base(worker)
        self._words[base + _PHASE] = 0
        self._words[base + _STEP] = -1
        self._words[base + _SINCE] = time.monotonic_ns()

    def set_step(self, worker: int, step: int) -> None:
        """``worker`` has the state after ``step`` steps."""
        self._words[_base(worker) + _STEP] = step

    def position(self, worker: int) -> Position:
        """Where ``worker`` is now."""
        words, base = self._words, _base(worker)
        since, phase = words[base + _SINCE], words[base + _PHASE]
        return Position(PHASES[phase], (time.monotonic_ns() - since) / 1e9, words[base + _STEP])

    def slowest_s(self, phase: str) -> float:
        """The longest that any worker has spent in ``phase`` without a beat, in seconds; 0 if none has left
        it yet."""
        at = _FIRST + _SLOWEST + PHASES.index(phase)
        return max(self._words[at : _FIRST + MAX_WORKERS * _WIDTH : _WIDTH].tolist(), default=0) / 1e9


def _base(worker: int) -> int:
    return _FIRST + worker * _WIDTH


class Heartbeat:
    """The heartbeat of one worker's main thread: the phase it is in, and the steps it has done.

    ``on_enter(phase, step)`` is called at each phase; faults are injected there. Calls from other threads are
    ignored, but for ``report``. Without a ``page``, outside of a supervisor, only ``on_enter`` is called.
    """

    def __init__(self, page: HeartbeatPage | None = None, worker: int = 0) -> None:
        self.page = page
        self.worker = worker
        self.on_enter: Callable[[str, int], None] | None = None
        self._thread = threading.get_ident()
        self._step = -1

    def enter(self, phase: str) -> None:
        """The main thread begins ``phase``."""
        if threading.get_ident() == self._thread:
            self.report(phase)

    def report(self, phase: str) -> None:
        """As ``enter``, from the main thread or from one that it waits for."""
        if self.page is not None:
            self.page.enter(self.worker, _NUMBERS[phase])
        if self.on_enter is not None:
            self.on_enter(phase, self._step)

    def beat(self) -> None:
        """The main thread makes progress in its phase."""
        if self.page is not None and threading.get_ident() == self._thread:
            self.page.beat(self.worker)

    def set_step(self, step: int) -> None:
        """This worker has the state after ``step`` steps."""
        self._step = step
        if self.page is not None:
            self.page.set_step(self.worker, step)
