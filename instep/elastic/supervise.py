"""Ranks that may die: ``supervise(work, ...)`` keeps a run alive until it is done.

A *generation* is one group of workers, from the moment they sit down until one of them is lost. When that
happens the survivors stay what they are, processes with a model in memory; they leave the broken group and
ask for a new seat. The supervisor puts somebody into the empty one, and gives all of them their seats in the
next generation.

    worker 0   sits . step . step . . . . . PeerLost, asks .  sits . step
    worker 1   sits . step . st#                               |
    worker 2   (spare: has built its model, waits) . . . . .  sits . step
                             ^ its sentinel is readable: noticed

What it watches: the sentinel of every process (one that dies is noticed at once), the state that the kernel
gives it (stopped), and the words that its main thread leaves in the shared page (no progress).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.elastic.failures import Failure, Patience
from instep.elastic.faults import Fault
from instep.elastic.member import Desk, Seat
from instep.elastic.memory import Place
from instep.elastic.page import MAX_WORKERS, Page
from instep.elastic.recovery import Recovery
from instep.elastic.signals import preempted
from instep.elastic.stuck import Reading, stuck
from instep.elastic.table import table
from instep.elastic.worker import Worker
from instep.mesh import roll
from instep.mesh.child import Child
from instep.mesh.exits import Exit, RankFailed, how, root_cause
from instep.mesh.launch import Children, surroundings, warm
from instep.mesh.peers import standing

LOOK_S = 0.25  # between two looks at who makes progress
SPARE_AFTER_S = 1.0  # of training: a run that is shorter needs none
NAMED_S = 1.0  # for a rank that others have waited for in vain to be lost too
MAX_SPARES_LOST = 3
GRACE_S = 2.0
# Exceptions that would come again, whoever computes: about the run, its files, or its settings.
FINAL = frozenset(
    {
        "instep.errors.CheckpointRejected",
        "instep.errors.ContractBroken",
        "instep.errors.Diverged",
        "FileExistsError",
        "FileNotFoundError",
        "OSError",
        "PermissionError",
    }
)
# Exceptions after which what is in memory is not to be trusted.
SUSPECT = frozenset({"instep.errors.ReplicasDiffer"})


@dataclass(frozen=True)
class Terms:
    """How to supervise. ``ranks`` workers, no fewer than ``min_ranks`` for a while if that is above 0."""

    ranks: int
    min_ranks: int = 0
    threads: int = 1
    timeout_s: float = 300.0
    faults: Sequence[Fault] = ()
    say: Callable[[str], None] = print
    note: Callable[[dict[str, Any]], None] = field(default=lambda event: None)


def supervise(work: Callable[..., object], args: tuple[Any, ...], terms: Terms) -> int:
    """Run ``work(desk, *args)`` in worker processes until one says that the run is finished; its exit code.

    ``work`` builds what it needs, asks for a seat through a ``Member`` and trains until it is lost, again and
    again. The first SIGTERM or SIGUSR1 sets ``Page.stop``; a second one ends everything at once.

    Raises:
        RankFailed: a worker failed before the first step, or in a way that would come again.
        RunFailed: the run failed again and again; every failure is listed.
    """
    warm(work.__module__)
    asked: list[str] = []  # the signals that came
    with preempted(asked.append), tempfile.TemporaryDirectory(prefix="instep-") as directory:
        supervisor = Supervisor(work, args, terms, Path(directory), asked)
        try:
            return supervisor.run()
        finally:
            supervisor.children.stop(0)
            supervisor.forget_memory()


class Supervisor:
    """At first all seats are empty; then, until the run is finished: wait, look, seat.

    ``forming`` while the next generation waits for its ``members`` to be free.
    """

    def __init__(
        self,
        work: Callable[..., object],
        args: tuple[Any, ...],
        terms: Terms,
        directory: Path,
        asked: Sequence[str] = (),
    ) -> None:
        self.work, self.args, self.terms, self.asked = work, args, terms, asked
        self.directory = directory
        self.children = Children()
        self.page = Page(directory / "page", create=True)
        self.workers: dict[int, Worker] = {}
        self.members: list[Worker] = []
        self.target = terms.ranks
        self.generation = 0
        self.forming = True
        self.patience = Patience()
        self.recovery: Recovery | None = None
        self.code: int | None = None
        self._number = 0
        self._memory: Place | None = None
        self._spares_lost = 0
        self._noticed_ns = 0
        self._somebody_died = False  # of this generation
        self._looked = self._seated = self._parted = time.monotonic()
        self._lost: list[dict[str, Any]] = []  # what this generation's members said when they left it

    def forget_memory(self) -> None:
        """Let the memory copy go."""
        if self._memory is not None:
            os.close(self._memory.fd)
        self._memory = None

    def run(self) -> int:
        """Until it is finished; the exit code."""
        self.members = [self._start() for _ in range(self.target)]
        while self.code is None:
            lines = [worker.connection for worker in self.workers.values() if not worker.hung_up]
            ended, ready = self.children.wait(LOOK_S, lines)
            for worker in list(self.workers.values()):
                if worker.connection in ready and (message := worker.hear()) is not None:
                    self._heard(worker, message)
            if ended and self.code is None:
                self._ended(ended)
            if self.asked and not self.page.stop:
                self.page.stop = True
                text = "ending after this step, with a checkpoint; once more ends at once"
                self.terms.say(f"{self.asked[0]}: {text}")
            if time.monotonic() - self._looked >= LOOK_S:
                self._look()
            if self.forming and self.code is None:
                self._seat()
        for worker in self.workers.values():
            if worker.free or worker not in self.members:
                self._dismiss(worker)
            worker.connection.close()  # who asks for a seat from now on is sent away
        self.children.wait_all(GRACE_S)
        return self.code

    def _start(self) -> Worker:
        taken = {worker.slot for worker in self.workers.values()}
        while self._number % MAX_WORKERS in taken:
            self._number += 1
        number, self._number = self._number, self._number + 1
        ours, theirs = self.children.context.Pipe()
        environ = surroundings(self.terms.threads, {})
        child = Child(number, self.terms.threads, str(self.directory), environ)
        slot = number % MAX_WORKERS
        self.page.reset(slot)
        pid = self.children.start(child, self.work, (Desk(slot, self.page.path, theirs), *self.args))
        theirs.close()
        self.workers[number] = Worker(child, pid, slot, ours, self.page)
        return self.workers[number]

    def _heard(self, worker: Worker, message: dict[str, Any]) -> None:
        match message["say"]:
            case "free":
                worker.free = True
                if worker in self.members and worker.generation == self.generation and self.generation:
                    self._left(worker, message)
            case "memory":
                self.forget_memory()
                self._memory = worker.take(message["inode"])
            case "stepped" if message["generation"] == self.generation and not self.forming:
                self._stepped(worker, message)
            case "finished":
                self.code = message["code"]

    def _left(self, worker: Worker, message: dict[str, Any]) -> None:
        """A member has left the current generation, because it has lost a peer or was asked to."""
        self._part()
        self._lost.append(message)
        for other in self.members:
            if other.rank in message.get("ranks", ()) and other.named_since is None:
                other.named_since = time.monotonic()

    def _stepped(self, worker: Worker, message: dict[str, Any]) -> None:
        """The current generation has made its first step."""
        if self.recovery is not None:
            self.recovery.stepped(message)
            self.terms.say(str(self.recovery))
            self.terms.note(self.recovery.fields())
        self.recovery = None

    def _ended(self, ended: Sequence[Exit]) -> None:
        """Workers have ended; what they said before still counts."""
        for end in ended:
            worker = self.workers[end.rank]
            while not worker.hung_up and worker.connection.poll() and (message := worker.hear()) is not None:
                self._heard(worker, message)
        if self.code is not None:
            return
        self._progress()
        dead = [self.workers.pop(end.rank) for end in ended]
        for worker in dead:
            worker.connection.close()
        lost = [(worker, end) for worker, end in zip(dead, ended, strict=True) if not worker.dismissed]
        self._require_another_try([replace(end, rank=worker.place) for worker, end in lost])
        for worker, end in lost:
            self._failed(worker, end)
        if any(worker in self.members for worker in dead):
            self.page.over = self.generation
            self.members = [worker for worker in self.members if worker not in dead]
            self._find_members()

    def _require_another_try(self, ended: Sequence[Exit]) -> None:
        """Raise ``RankFailed`` if the run has not begun, or failed in a way that would come again."""
        begun = self.patience.step >= 0
        if not any(end.error and (not begun or end.error.type in FINAL) for end in ended):
            return
        others = self.children.wait_all(GRACE_S / 4)  # which may have failed for the same reason, or know it
        exits = [*ended, *(replace(end, rank=self.workers[end.rank].place) for end in others)]
        raise RankFailed(root_cause(exits) or ended[0], max(self.target, len(self.members)))

    def _failed(self, worker: Worker, end: Exit) -> None:
        """A worker has failed: say so, and end the run if that was once too often."""
        position = self.page.position(worker.slot)
        error = f"{end.error.type}: {end.error.message}" if end.error else ""
        # One that has never had a seat is a try of its own.
        attempt = worker.generation or -worker.number - 1
        where = (attempt, position.step, position.phase)
        failure = Failure(worker.rank, end.pid, *where, worker.killed or how(end), error)
        if end.error is not None and end.error.type in SUSPECT:
            self.forget_memory()
        if worker in self.members:
            self._somebody_died = True
            self.recovery = self.recovery or Recovery(failure)
        else:
            self._spares_lost += 1
        told = end.error is None or end.error.type.startswith("instep.")  # its message says all
        self._tell(failure, worker.stacks if told or end.error is None else end.error.traceback)

    def _tell(self, failure: Failure, detail: str) -> None:
        self.terms.say(str(failure))
        if detail:
            self.terms.say(detail.rstrip())
        noticed_ns, fired_ns = time.monotonic_ns(), self.page.fired_ns
        injected = {"injected_ns": fired_ns} if fired_ns > self._noticed_ns else {}
        self.terms.note({"event": "failure", "noticed_ns": noticed_ns, **injected, **failure.fields()})
        self._noticed_ns = noticed_ns
        self.patience.add(failure)

    def _progress(self) -> None:
        steps = (self.page.position(worker.slot).step for worker in self.workers.values())
        self.patience.progressed(max(steps, default=-1))

    def _find_members(self) -> None:
        """Decide who takes part in the next generation, and start whoever is missing."""
        self._part()
        others = [worker for worker in self._living() if worker not in self.members]
        others.sort(key=lambda worker: not worker.free)  # those that are ready first
        self.members.sort(key=lambda worker: worker.place)
        while len(self.members) > self.target:
            self._dismiss(self.members.pop())
        while len(self.members) < self.target and others and (others[0].free or not self._enough()):
            self.members.append(others.pop(0))
        while len(self.members) < self.target and not self._enough():
            self.members.append(self._start())
        missing = self.target - len(self.members) - len(others)
        for _ in range(missing):
            self._start()  # it will be asked to join when it is ready

    def _living(self) -> list[Worker]:
        return [w for w in self.workers.values() if not w.dismissed and not w.killed]

    def _part(self) -> None:
        """From now on the next generation is wanted."""
        if not self.forming:
            self._parted = time.monotonic()
        self.forming = True

    def _enough(self) -> bool:
        return 0 < self.terms.min_ranks <= len(self.members)

    def _dismiss(self, worker: Worker) -> None:
        worker.dismissed = True
        if worker.free:
            worker.give(None)
        else:
            worker.end()

    def _look(self) -> None:
        """See who makes progress, and whether it is time to grow, to shrink, or to have a spare."""
        self._looked = now = time.monotonic()
        self._progress()
        wanted = self.generation + 1 if self.forming else self.generation
        over_s = now - self._parted
        readings = {number: worker.read(wanted, over_s) for number, worker in self.workers.items()}
        found = stuck(readings, self.page.slowest_s, self.terms.timeout_s)
        for worker in self.members:
            if not worker.free and worker.named_since is not None and now - worker.named_since > NAMED_S:
                found.setdefault(worker.number, "never came where others waited for it")
        found = {number: why for number, why in found.items() if not self.workers[number].killed}
        if found:
            self._end_stuck(found, readings)
        self._resize()
        settled = not self.forming and now - self._seated > SPARE_AFTER_S
        if settled and len(self._living()) == self.target and self._spares_lost < MAX_SPARES_LOST:
            self._start()

    def _end_stuck(self, found: Mapping[int, str], readings: Mapping[int, Reading]) -> None:
        """Say where everybody is, then end the workers in ``found``, for the reason there."""
        self.terms.say(table(self.workers.values(), readings))
        seated = {worker.rank: worker.pid for worker in self.members if worker.rank >= 0}
        rows = standing(seated)
        absent = [self.workers[number].rank for number in found]
        self.terms.say(roll.table(rows, [rank for rank in absent if rank in seated]))
        told = {row.rank for row in rows if row.stack}
        for number, why in found.items():
            self.workers[number].kill(why, ask=self.workers[number].rank not in told)

    def _resize(self) -> None:
        """Another number of ranks, if a fault says so or one that was missing is back."""
        for number, fault in enumerate(self.terms.faults):
            if fault.kind == "resize" and self.patience.step >= fault.step and self.page.fire(number):
                self.target = fault.ranks
        ready = [w for w in self._living() if w.free and w not in self.members]
        missing = self.target - len(self.members)
        if self.forming or not missing:
            return
        if missing < 0 or len(ready) >= missing:
            self.page.regroup = self.generation
        else:
            for _ in range(self.target - len(self._living())):
                self._start()

    def _seat(self) -> None:
        """Begin the next generation, if all its members are free."""
        if not all(worker.free for worker in self.members):
            return
        if self.generation and len(self.members) != self.target:
            self._find_members()
            if not all(worker.free for worker in self.members):
                return
        self._blame()
        self.generation += 1
        self.forming, self._lost, self._seated = False, [], time.monotonic()
        self._somebody_died = False
        seats = _ranks([worker.rank for worker in self.members])
        for worker, rank in zip(self.members, seats, strict=True):
            worker.named_since = None
            store = str(self.directory / f"store-{self.generation}")
            worker.give(Seat(self.generation, rank, len(self.members), store, self._memory))
        if self.recovery is not None:
            self.recovery.seated()

    def _blame(self) -> None:
        """All have left a generation in which nobody died: if not because they were asked to, count it."""
        errors = [message for message in self._lost if message.get("error")]
        if errors and not self._somebody_died:
            first = errors[0]
            where = (first["rank"], first["pid"], self.generation, first["step"], first["phase"])
            failure = Failure(*where, "lost its group", first["error"])
            self.recovery = self.recovery or Recovery(failure)
            self._tell(failure, failure.error)


def _ranks(before: Sequence[int]) -> list[int]:
    """The ranks of members that had ``before`` (-1: none): everybody keeps its own where that is possible."""
    taken = [rank if rank < len(before) and before.index(rank) == i else -1 for i, rank in enumerate(before)]
    left = iter(sorted(set(range(len(before))) - set(taken)))
    return [rank if rank >= 0 else next(left) for rank in taken]
