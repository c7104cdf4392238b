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

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.elastic.crew import Crew
from instep.elastic.failures import Failure, Patience
from instep.elastic.faults import Fault
from instep.elastic.member import Seat
from instep.elastic.memory import Kept
from instep.elastic.page import MAX_WORKERS
from instep.elastic.recovery import Recovery
from instep.elastic.shelf import Shelf
from instep.elastic.signals import preempted
from instep.elastic.stuck import Reading, stuck
from instep.elastic.table import table
from instep.elastic.worker import Worker
from instep.mesh import roll
from instep.mesh.exits import Exit, RankFailed, how, root_cause
from instep.mesh.launch import warm
from instep.mesh.peers import standing

LOOK_S = 0.25  # between two looks at who makes progress
SPARE_AFTER_S = 1.0  # of training: a run that is shorter needs none
NAMED_S = 1.0  # for a rank that others have waited for in vain to be lost too
MAX_RANKS = MAX_WORKERS // 2  # each may have to be replaced while it is still ending
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
    if not 0 < terms.ranks <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks on one host, got {terms.ranks}")
    warm(work.__module__)
    asked: list[str] = []  # the signals that came
    with preempted(asked.append), tempfile.TemporaryDirectory(prefix="instep-") as directory:
        supervisor = Supervisor(work, args, terms, Path(directory), asked)
        try:
            return supervisor.run()
        finally:
            supervisor.crew.stop()
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
        self.terms, self.asked, self.directory = terms, asked, directory
        self.crew = Crew(work, args, terms.threads, directory)
        self.page = self.crew.page
        self.members: list[Worker] = []
        self.target = terms.ranks
        self.generation = 0
        self.forming = True
        self.patience = Patience()
        self.recovery: Recovery | None = None
        self.code: int | None = None
        self._memory = Shelf()
        self._spares_lost = 0
        self._noticed_ns = 0
        self._somebody_died = False  # of this generation
        self._looked = self._seated = self._parted = time.monotonic()
        self._lost: list[dict[str, Any]] = []  # what this generation's members said when they left it

    def forget_memory(self) -> None:
        """Let the memory copies go."""
        self._memory.clear()

    def run(self) -> int:
        """Until it is finished; the exit code."""
        self.members = [self.crew.start() for _ in range(self.target)]
        while self.code is None:
            said, ended = self.crew.wait(LOOK_S)
            for worker, message in said:
                self._heard(worker, message)
            if self.code is not None:
                break
            if ended:
                self._ended(ended)
            if self.asked and not self.page.stop:
                self.page.stop = True
                text = "ending after this step, with a checkpoint; once more ends at once"
                self.terms.say(f"{self.asked[0]}: {text}")
            if time.monotonic() - self._looked >= LOOK_S:
                self._look()
            if self.forming:
                self._seat()
        self.crew.disband(self.members, GRACE_S)
        return self.code

    def _heard(self, worker: Worker, message: dict[str, Any]) -> None:
        match message["say"]:
            case "free":
                worker.free = True
                if worker in self.members and worker.generation == self.generation and self.generation:
                    self._left(worker, message)
            case "memory":
                generation, rank = message["generation"], message["rank"]
                self._memory.add(Kept(message["place"], generation, rank, message["num_ranks"]))
            case "stepped" if message["generation"] == self.generation and not self.forming:
                self._stepped(message)
            case "finished":
                self.code = message["code"]

    def _left(self, worker: Worker, message: dict[str, Any]) -> None:
        """A member has left the current generation, because it has lost a peer or was asked to."""
        self._part()
        if message.get("error"):
            self.page.over = self.generation
        self._lost.append(message)
        for other in self.members:
            if other.rank in message.get("ranks", ()) and other.named_since is None:
                other.named_since = time.monotonic()

    def _stepped(self, message: dict[str, Any]) -> None:
        """The current generation has made its first step."""
        if self.recovery is not None:
            self.recovery.stepped(message)
            self.terms.say(str(self.recovery))
            self.terms.note(self.recovery.fields())
        self.recovery = None

    def _ended(self, ended: Sequence[tuple[Worker, Exit]]) -> None:
        """Workers have ended without having finished the run."""
        self.patience.progressed(max(self.page.position(worker.slot).step for worker, _ in ended))
        if any(end.error is not None and end.error.told for _, end in ended):
            ended = [*ended, *self.crew.wait_all(GRACE_S / 4)]  # among them the one that raised it
        lost = [(worker, end) for worker, end in ended if not worker.dismissed]
        self._require_another_try([each for each in lost if each[0] in self.members])
        for worker, end in lost:
            self._failed(worker, end)
        if any(worker in self.members for worker, _ in lost):
            self.page.over = self.generation
            self.members = [worker for worker in self.members if worker in self.crew.workers.values()]
            self._find_members()

    def _require_another_try(self, lost: Sequence[tuple[Worker, Exit]]) -> None:
        """Raise ``RankFailed`` if the run has not begun, or failed in a way that would come again."""
        begun = max(self.patience.step, self.crew.step) >= 0
        if not any(end.error and (not begun or end.error.type in FINAL) for _, end in lost):
            return
        # Others may have failed for the same reason, or know it.
        exits = [replace(end, rank=worker.place) for worker, end in [*lost, *self.crew.wait_all(GRACE_S / 4)]]
        raise RankFailed(root_cause(exits) or exits[0], max(self.target, len(self.members)))

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
        if end.error is None or end.error.type.startswith("instep."):
            self._note(failure, worker.stacks, quiet=end.error is not None and end.error.told)
        else:
            self._note(failure, end.error.traceback)

    def _note(self, failure: Failure, detail: str, *, quiet: bool = False) -> None:
        """Write ``failure`` down, say it unless another rank has said it, and count it."""
        if not quiet:
            self.terms.say("\n".join([str(failure), *([detail.rstrip()] if detail else [])]))
        noticed_ns, fired_ns = time.monotonic_ns(), self.page.fired_ns
        injected = {"injected_ns": fired_ns} if fired_ns > self._noticed_ns else {}
        self.terms.note({"event": "failure", "noticed_ns": noticed_ns, **injected, **failure.fields()})
        self._noticed_ns = noticed_ns
        self.patience.progressed(max(failure.step, self.crew.step))
        self.patience.add(failure)

    def _find_members(self) -> None:
        """Decide who takes part in the next generation, and start whoever is missing."""
        self._part()
        others = [worker for worker in self.crew.living if worker not in self.members]
        others.sort(key=lambda worker: not worker.free)  # those that are ready first
        self.members.sort(key=lambda worker: worker.place)
        while len(self.members) > self.target:
            self.crew.dismiss(self.members.pop())
        while len(self.members) < self.target and others and (others[0].free or not self._enough()):
            self.members.append(others.pop(0))
        while len(self.members) < self.target and not self._enough():
            self.members.append(self.crew.start())
        missing = self.target - len(self.members) - len(others)
        for _ in range(missing):
            self.crew.start()  # it will be asked to join when it is ready

    def _part(self) -> None:
        """From now on the next generation is wanted."""
        if not self.forming:
            self._parted = time.monotonic()
        self.forming = True

    def _enough(self) -> bool:
        return 0 < self.terms.min_ranks <= len(self.members)

    def _look(self) -> None:
        """See who makes progress, and whether it is time to grow, to shrink, or to have a spare."""
        self._looked = now = time.monotonic()
        self.patience.progressed(self.crew.step)
        wanted = self.generation + 1 if self.forming else self.generation
        over_s = now - self._parted
        readings = {worker.number: worker.read(wanted, over_s) for worker in self.crew.living}
        found = stuck(readings, self.page.slowest_s, self.terms.timeout_s)
        for worker in self.members:
            named_s = 0.0 if worker.named_since is None else now - worker.named_since
            if worker.number in readings and not worker.free and named_s > NAMED_S:
                found.setdefault(worker.number, "never came where others waited for it")
        if found:
            self._end_stuck(found, readings)
        self._resize()
        settled = not self.forming and now - self._seated > SPARE_AFTER_S
        if settled and len(self.crew.living) == self.target and self._spares_lost < MAX_SPARES_LOST:
            self.crew.start()

    def _end_stuck(self, found: Mapping[int, str], readings: Mapping[int, Reading]) -> None:
        """Say where everybody is, then end the workers in ``found``, for the reason there."""
        self.terms.say(table(self.crew.living, readings))
        seated = {worker.rank: worker.pid for worker in self.members if worker.rank >= 0}
        rows = standing(seated)
        absent = [self.crew.workers[number].rank for number in found]
        self.terms.say(roll.table(rows, [rank for rank in absent if rank in seated]))
        told = {row.rank for row in rows if row.stack}
        for number, why in found.items():
            worker = self.crew.workers[number]
            self.page.excuse(worker.slot)
            worker.kill(why, ask=worker.rank not in told)

    def _resize(self) -> None:
        """Another number of ranks, if a fault says so or one that was missing is back."""
        for number, fault in enumerate(self.terms.faults):
            settled = not self.forming and len(self.members) == self.target  # one change after the other
            due = fault.kind == "resize" and self.patience.step >= fault.step
            if settled and due and self.page.fire(number):
                self.target = fault.ranks
        ready = [w for w in self.crew.living if w.free and w not in self.members]
        missing = self.target - len(self.members)
        if self.forming or not missing:
            return
        if missing < 0 or len(ready) >= missing:
            self.page.regroup = self.generation
        elif self._spares_lost < MAX_SPARES_LOST:
            for _ in range(self.target - len(self.crew.living)):
                self.crew.start()

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
            worker.give(Seat(self.generation, rank, len(self.members), store, self._memory.kept))
        if self.recovery is not None:
            self.recovery.seated()

    def _blame(self) -> None:
        """All have left a generation in which nobody died: if not because they were asked to, count it."""
        errors = [message for message in self._lost if message.get("error")]
        if errors and not self._somebody_died:
            first = errors[0]
            where = (first["rank"], first["pid"], self.generation, first["step"], first["phase"])
            failure = Failure(*where, f"lost its group: {first['error']}", first["error"])
            self.recovery = self.recovery or Recovery(failure)
            self._note(failure, "")


def _ranks(before: Sequence[int]) -> list[int]:
    """The ranks of members that had ``before`` (-1: none): everybody keeps its own where that is possible."""
    taken = [rank if rank < len(before) and before.index(rank) == i else -1 for i, rank in enumerate(before)]
    left = iter(sorted(set(range(len(before))) - set(taken)))
    return [rank if rank >= 0 else next(left) for rank in taken]
