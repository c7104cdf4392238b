"""The supervisor's worker pool: processes that are started, heard, assigned ranks, dismissed, and killed.

    start -> (loads torch, builds its model) -> ready -> assigned a rank -> trains -> ready, or ended
                                                  |-> dismissed

A worker is ready while it waits for an assignment; one that has no rank yet is a spare. Generations are the
supervisor's: here a worker is in the one that it was assigned to last.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from instep.elastic.heartbeat import BEATING, MAX_WORKERS, HeartbeatPage
from instep.elastic.rendezvous import MESSAGE_BYTES, Assignment, WorkerSpec
from instep.elastic.watchdog import Reading
from instep.launch.launch import Children, surroundings
from instep.launch.memory_file import MemoryFile
from instep.launch.process_state import io_counters, waits_for_device
from instep.launch.rank_exit import Exit
from instep.launch.rank_process import STACKS_SIGNAL, Child
from instep.net.hang_report import aligned
from instep.net.peers import is_stopped

HANDLE_S = 5.0  # for a descriptor to follow its message: of a busy machine, too
STACKS_S = 0.5  # for a process to write its stacks down

Message = dict[str, Any]


@dataclass
class Worker:
    """One process, as the supervisor sees it.

    ``ready`` while it waits for an assignment; ``rank`` and ``generation`` are those of the last one (none so
    far: -1 and 0). ``finished`` is the exit code with which it has said that it is done; None before.
    """

    child: Child
    pid: int
    slot: int  # in the heartbeat page
    connection: Connection
    page: HeartbeatPage
    place: int | None = None  # its local rank, and so its GPU, from when it has one; a spare has none
    rank: int = -1
    generation: int = 0
    asks_place: bool = False
    ready: bool = False
    finished: int | None = None
    missed_since: float | None = None  # when another rank said that it has waited for this one in vain
    killed: str = ""  # why the supervisor has killed it
    dismissed: bool = False
    stacks: str = ""  # of its threads, if it was asked for them before it was killed
    hung_up: bool = False
    _stopped_since: float | None = field(default=None, repr=False)
    _io: bytes | None = field(default=None, repr=False)
    _io_since: float = field(default=-math.inf, repr=False)

    @property
    def number(self) -> int:
        return self.child.number

    @property
    def rank_or_number(self) -> int:
        """Its rank; before it has one, its number in the order of starting."""
        return self.rank if self.rank >= 0 else self.number

    def receive(self) -> Message | None:
        """Its next message, with the descriptor that it may have sent along; None if it has hung up."""
        try:
            message: Message = json.loads(self.connection.recv_bytes(MESSAGE_BYTES))
            if message["say"] == "snapshot":
                if not self.connection.poll(HANDLE_S):
                    raise EOFError("the descriptor of a snapshot did not follow its message")
                fd = reduction.recv_handle(self.connection)
                message["place"] = MemoryFile(os.getpid(), fd, message["inode"])
        except (EOFError, OSError, RuntimeError, ValueError):
            self.hung_up = True
            return None
        return message

    def give_place(self, place: int) -> None:
        """It has local rank ``place`` from now on, and is told if it waits for that."""
        self.place = place
        if self.asks_place:
            self.asks_place = False
            with suppress(OSError):  # it has died; that is noticed elsewhere
                self.connection.send_bytes(json.dumps(place).encode())

    def assign(self, assignment: Assignment | None) -> None:
        """Give it its next rank, or (None) let it leave."""
        self.ready = False
        if assignment is not None:
            self.rank, self.generation = assignment.rank, assignment.generation
        with suppress(OSError):  # it has died; that is noticed elsewhere
            self.connection.send_bytes(b"" if assignment is None else assignment.to_bytes())

    def read(self, generation: int, over_s: float, *, alone: bool = False) -> Reading:
        """Its heartbeat now; the generation before ``generation`` has been over for ``over_s``, and it is
        ``alone`` in this one."""
        stopped, now = is_stopped(self.pid), time.monotonic()
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        stopped_s = 0.0 if self._stopped_since is None else now - self._stopped_since
        left_behind_s = over_s if 0 < self.generation < generation and not self.ready else 0.0
        position = self.page.position(self.slot)
        if position.phase not in BEATING:
            self._io = None
            return Reading(position, stopped_s, left_behind_s, alone)
        idle_s = self._idle_s(now)
        return Reading(position, stopped_s, left_behind_s, alone, idle_s, waits_for_device(self.pid))

    def _idle_s(self, now: float) -> float:
        """For how long it has not been seen to read or write."""
        before, self._io = self._io, io_counters(self.pid)
        if before is None:
            self._io_since = -math.inf
        elif self._io != before:
            self._io_since = now
        return now - self._io_since

    def kill(self, why: str, *, ask: bool = True) -> None:
        """Kill it, ``why`` is told as its end; ``ask`` it first for its stacks, which nothing can hold up."""
        self.killed = why
        if ask and not is_stopped(self.pid):
            self.stacks = self._ask_stacks()
        self.send_sigkill()

    def send_sigkill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _ask_stacks(self) -> str:
        with suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
            until, before = time.monotonic() + STACKS_S, ""
            while time.monotonic() < until:
                text = self.child.stacks.path.read_text(errors="replace")
                if "Current thread" in text and text == before:  # it is the last, and it is whole
                    return text
                before = text
                time.sleep(0.01)
        return ""


class WorkerPool:
    """Processes that run ``work(spec, *args)``, by number; none of them is left after ``stop``."""

    def __init__(self, work: Callable[..., object], args: tuple[Any, ...], threads: int) -> None:
        self.workers: dict[int, Worker] = {}
        self.page = HeartbeatPage.create()
        self._work, self._args, self._threads = work, args, threads
        self._children = Children()
        self._number = 0

    @property
    def living(self) -> list[Worker]:
        """Those that were neither dismissed nor killed."""
        return [w for w in self.workers.values() if not w.dismissed and not w.killed]

    @property
    def step(self) -> int:
        """The most steps that one of them has done; -1: none has a state yet."""
        return max((self.page.position(w.slot).step for w in self.workers.values()), default=-1)

    def start(self, place: int | None, num_places: int) -> Worker:
        """Start one more, as local rank ``place``, or as a spare (None). May raise ``OSError``."""
        taken = {worker.slot for worker in self.workers.values()}
        while self._number % MAX_WORKERS in taken:
            self._number += 1
        number, self._number = self._number, self._number + 1
        ours, theirs = self._children.context.Pipe()
        environ = surroundings(self._threads, {})
        child = Child(number, self._threads, environ)
        slot = number % MAX_WORKERS
        self.page.reset(slot)
        spec = WorkerSpec(slot, self.page.file, theirs, place, num_places)
        try:
            pid = self._children.start(child, self._work, (spec, *self._args))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.workers[number] = Worker(child, pid, slot, ours, self.page, place)
        return self.workers[number]

    def wait(self, timeout_s: float) -> tuple[list[tuple[Worker, Message]], list[tuple[Worker, Exit]]]:
        """The messages that came, and the workers that have ended, each after all of its messages."""
        channels = {worker.connection: worker for worker in self.workers.values() if not worker.hung_up}
        ended, readable = self._children.wait(timeout_s, list(channels))
        messages = [
            (channels[channel], message)
            for channel in readable
            if (message := channels[channel].receive()) is not None
        ]
        dead = [(self.workers.pop(end.rank), end) for end in ended]
        for worker, _ in dead:
            messages += [(worker, message) for message in _rest(worker)]
            worker.connection.close()
        return messages, dead

    def wait_all(self, timeout_s: float) -> list[tuple[Worker, Exit]]:
        """The workers that have ended when all have, or the time is up."""
        return [(self.workers.pop(end.rank), end) for end in self._children.wait_all(timeout_s)]

    def dismiss(self, worker: Worker) -> None:
        """It is not needed any more: let it leave if it waits for an assignment, else kill it."""
        worker.dismissed = True
        if worker.ready:
            worker.assign(None)
        else:
            worker.send_sigkill()

    def disband(self, finished: Collection[Worker], grace_s: float) -> None:
        """The run is over: workers that have ``finished`` it have this long to end, all others go now."""
        for worker in self.workers.values():
            if worker.ready or worker not in finished:
                self.dismiss(worker)
            worker.connection.close()  # a worker that asks for an assignment from now on ends
        self._children.wait_all(grace_s)

    def stop(self) -> None:
        """Kill all that are left."""
        self._children.stop(0)
        for worker in self.workers.values():
            worker.connection.close()
        self.page.file.close()


def _rest(worker: Worker) -> Iterator[Message]:
    """The messages of a worker that were not received yet."""
    while not worker.hung_up and worker.connection.poll() and (message := worker.receive()) is not None:
        yield message


def progress_table(workers: Iterable[Worker], readings: Mapping[int, Reading]) -> str:
    """One line per worker: rank, process, phase, for how long, and how many steps it has made."""
    rows: list[Sequence[str]] = [("rank", "pid", "phase", "seconds", "steps", "")]
    for worker in workers:
        reading = readings[worker.number]
        position = reading.position
        rows.append(
            (
                str(worker.rank) if worker.rank >= 0 else "-",
                str(worker.pid),
                position.phase,
                f"{position.seconds:.1f}",
                str(position.step),
                f"stopped for {reading.stopped_s:.1f} s" if reading.stopped_s else "",
            )
        )
    return "\n".join(aligned(rows))
