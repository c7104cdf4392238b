"""Ranks that may die: ``supervise(work, ...)`` keeps a run alive until it is done.

A *generation* is one group of workers, from their rendezvous until one of them is lost. When that happens the
survivors stay what they are, processes with a model in memory; they leave the broken group and are ready for
another assignment. The supervisor puts a spare or a new worker in the place of the lost one, and assigns the
ranks of the next generation.

    worker 0   joins . step . step . . . . . PeerLost, ready .  joins . step
    worker 1   joins . step . st#                               |
    worker 2   (spare: has built its model, ready) . . . . . .  joins . step
                              ^ its sentinel is readable: noticed

What it watches: the sentinel of every process (one that dies is noticed at once), the state that the kernel
gives it (stopped), and the heartbeat of its main thread (no progress).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instep.elastic.failures import Failure, Recovery, RetryLimit, RunFailed
from instep.elastic.faults import Fault
from instep.elastic.heartbeat import MAX_WORKERS
from instep.elastic.rendezvous import Assignment
from instep.elastic.snapshot import SnapshotHandle, SnapshotStore
from instep.elastic.watchdog import Reading, find_stuck
from instep.elastic.worker_pool import Message, Worker, WorkerPool, progress_table
from instep.launch.launch import warm
from instep.launch.memory_file import MemoryFile
from instep.launch.rank_exit import ErrorRecord, Exit, RankFailed, describe_exit, root_cause
from instep.launch.signals import preempted
from instep.net.hang_report import status_table
from instep.net.peers import statuses_of

LOOK_S = 0.25  # between two looks at the heartbeats
SPARE_AFTER_S = 1.0  # of training: a run that is shorter needs none
MISSED_S = 1.0  # for a rank that others have waited for in vain to leave, too
MAX_RANKS = MAX_WORKERS // 2  # each may have to be replaced while it is still ending
MAX_SPARES_LOST = 3
GRACE_S = 2.0
# Exceptions of instep that would come again on any worker: about the run, its files, or its settings.
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
class SuperviseOptions:
    """How to supervise a run of ``ranks`` workers.

    With ``min_ranks`` above 0 the run goes on with as few of them until a lost one is replaced. ``say`` gets
    what people shall read, ``note`` each failure and recovery as JSON. ``admit`` is given what each worker
    says when it is ready for the first time; its answer to the first is told to all with their ranks, and an
    error that it raises ends the run.
    """

    ranks: int
    min_ranks: int = 0
    threads: int = 1
    timeout_s: float = 300.0
    faults: Sequence[Fault] = ()
    say: Callable[[str], None] = print
    note: Callable[[dict[str, Any]], None] = field(default=lambda event: None)
    admit: Callable[[Message], str] = field(default=lambda message: "")


def supervise(work: Callable[..., object], args: tuple[Any, ...], options: SuperviseOptions) -> int:
    """Run ``work(spec, *args)`` in worker processes until all have said that it is finished; its exit code.

    ``work`` builds what it needs, asks for its rank through a ``ControlChannel`` and trains until a rank is
    lost, again and again. The first SIGTERM or SIGUSR1 sets ``HeartbeatPage.stop``; a second one ends
    everything at once.

    Raises:
        RankFailed: a worker failed before the first step, or in a way that would come again.
        RunFailed: the run failed again and again; every failure is listed.
    """
    if not 0 < options.ranks <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks on one host, got {options.ranks}")
    warm(work.__module__)
    asked: list[str] = []  # the signals that came
    with preempted(asked.append):
        supervisor = Supervisor(work, args, options, asked)
        try:
            return supervisor.run()
        except KeyboardInterrupt as error:
            done = max(supervisor.retries.step, supervisor.pool.step, 0)
            raise KeyboardInterrupt(f"after {done} steps") from error
        finally:
            supervisor.close()


class Supervisor:
    """Until the run is finished: wait for messages and exits, look at the heartbeats, assign ranks.

    ``members`` are the workers of the current generation; while it is ``forming``, those of the next one,
    which begins when all of them are ready.
    """

    def __init__(
        self,
        work: Callable[..., object],
        args: tuple[Any, ...],
        options: SuperviseOptions,
        asked: Sequence[str] = (),
    ) -> None:
        self.options, self.asked = options, asked
        self.pool = WorkerPool(work, args, options.threads)
        self.page = self.pool.page
        self.members: list[Worker] = []
        self.target = options.ranks
        self.generation = 0
        self.forming = True
        self.retries = RetryLimit()
        self.recovery: Recovery | None = None
        self.code: int | None = None
        self.told: str | None = None  # with each assignment
        self._snapshots = SnapshotStore()
        self._store: MemoryFile | None = None  # in which the current generation has met
        self._spares_lost = 0
        self._unseen = dict(enumerate(options.faults))  # those by which no worker has ended yet
        self._noticed_ns = 0
        self._member_failed = False  # of this generation
        self._looked = self._assigned = self._ended_at = time.monotonic()
        self._lost: list[Message] = []  # of this generation's members, when they left it

    def close(self) -> None:
        """Kill all workers, and let go what this process has held for them."""
        self.pool.stop()
        self._snapshots.clear()
        self._replace_store(None)

    def _replace_store(self, store: MemoryFile | None) -> None:
        """Members of the generation before have opened theirs, or will never join it."""
        if self._store is not None:
            self._store.close()
        self._store = store

    def run(self) -> int:
        """Supervise until the run is finished; its exit code."""
        self.members = [self._start() for _ in range(self.target)]
        while self.code is None:
            messages, ended = self.pool.wait(LOOK_S)
            for worker, message in messages:
                self._receive(worker, message)
            if self.code is not None:
                break
            if ended:
                self._handle_exits(ended)
            if self.asked and not self.page.stop:
                self.page.stop = True
                text = "stopping after this step, with a checkpoint; a second signal stops at once"
                self.options.say(f"{self.asked[0]}: {text}")
            if time.monotonic() - self._looked >= LOOK_S:
                self._look()
            if self.forming:
                self._begin_generation()
        self._tell_of_missed_faults()
        self.pool.disband(self.members, GRACE_S)
        return self.code

    def _tell_of_missed_faults(self) -> None:
        """A run that was to be disturbed, and was not, has shown nothing."""
        for number, fault in enumerate(self.options.faults):
            happens_once = fault.kind != "nan" and fault.steps == 1
            if happens_once and not self.page.fired(number):
                self.options.say(f"--fault {fault} not triggered: its rank, step or phase was never reached")

    def _receive(self, worker: Worker, message: Message) -> None:
        match message["say"]:
            case "ready":
                worker.ready = True
                if not worker.generation and not self.generation:
                    answer = self.options.admit(message)
                    self.told = answer if self.told is None else self.told
                if worker in self.members and worker.generation == self.generation and self.generation:
                    self._left(worker, message)
            case "place":
                worker.asks_place = True
                if worker.place is None:
                    self._give_places()
                else:  # it replaces a rank that was lost meanwhile
                    worker.give_place(worker.place)
            case "deadline":  # of the script, which the command may not know
                self.options = replace(self.options, timeout_s=message["seconds"])
            case "snapshot":
                generation, rank = message["generation"], message["rank"]
                self._snapshots.add(SnapshotHandle(message["place"], generation, rank, message["num_ranks"]))
            case "stepped" if message["generation"] == self.generation and not self.forming:
                self._stepped(message)
            case "finished":
                worker.finished = message["code"]
                if worker not in self.members:  # a spare, which the run can do without
                    self._spares_lost += 1
                    self.options.say(f"a spare (pid {worker.pid}) ended with code {worker.finished}")
                elif worker.finished or all(member.finished is not None for member in self.members):
                    self.code = worker.finished

    def _left(self, worker: Worker, message: Message) -> None:
        """A member has left the current generation, because it has lost a peer or was asked to."""
        self._end_generation()
        if message.get("error"):
            self.page.over = self.generation
        self._lost.append(message)
        for other in self.members:
            if other.rank in message.get("ranks", ()) and other.missed_since is None:
                other.missed_since = time.monotonic()

    def _stepped(self, message: Message) -> None:
        """The current generation has done its first step."""
        if self.recovery is not None:
            self.recovery.stepped(message)
            self.options.say(str(self.recovery))
            self.options.note(self.recovery.fields())
        self.recovery = None

    def _handle_exits(self, ended: Sequence[tuple[Worker, Exit]]) -> None:
        """Workers have ended before the run was finished."""
        self.retries.progressed(max(self.page.position(worker.slot).step for worker, _ in ended))
        if any(end.error is not None and end.error.told for _, end in ended):
            ended = [*ended, *self.pool.wait_all(GRACE_S / 4)]  # one of which raised it first
        lost = [(w, end) for w, end in ended if not w.dismissed and w.finished is None]
        self._require_another_try([each for each in lost if each[0] in self.members])
        for worker, end in lost:
            self._failed(worker, end)
        if any(worker in self.members for worker, _ in lost):
            self.page.over = self.generation
            self.members = [worker for worker in self.members if worker in self.pool.workers.values()]
            self._find_members()

    def _require_another_try(self, lost: Sequence[tuple[Worker, Exit]]) -> None:
        """Raise ``RankFailed`` if the run has not begun, failed in a way that would come again, or is at its
        end: those that have finished meet with no newcomer."""
        if lost and any(member.finished is not None for member in self.members):
            exits = [replace(end, rank=worker.rank_or_number) for worker, end in lost]
            raise RankFailed(root_cause(exits) or exits[0], len(self.members))
        begun = max(self.retries.step, self.pool.step) >= 0
        # The members of a run that has begun have what a newcomer could not get.
        lost = [(worker, end) for worker, end in lost if worker.generation or not begun]
        if not any(end.error and (not begun or _is_final(end.error)) for _, end in lost):
            return
        # Others may have failed for the same reason, or know it.
        lost = [*lost, *self.pool.wait_all(GRACE_S / 4)]
        exits = [replace(end, rank=worker.rank_or_number) for worker, end in lost]
        raise RankFailed(root_cause(exits) or exits[0], max(self.target, len(self.members)))

    def _failed(self, worker: Worker, end: Exit) -> None:
        """A worker has failed: say so, and end the run if that was one too many."""
        position = self.page.position(worker.slot)
        error = f"{end.error.type}: {end.error.message}" if end.error else ""
        # That of a spare, which is of no generation, is an attempt of its own.
        attempt = worker.generation or -worker.number - 1
        where = (attempt, position.step, position.phase)
        how = worker.killed or describe_exit(end, self._fault_behind(worker, end))
        failure = Failure(worker.rank, end.pid, *where, how, error)
        if end.error is not None and end.error.type in SUSPECT:
            self._snapshots.clear()
        if worker in self.members:
            self._member_failed = True
            self.recovery = self.recovery or Recovery(failure)
        else:
            self._spares_lost += 1
        if worker.generation == 0 and end.error is not None:
            self._note(failure, "")
        elif end.error is None or end.error.type.startswith("instep."):
            self._note(failure, worker.stacks, quiet=end.error is not None and end.error.told)
        else:
            self._note(failure, end.error.traceback)

    def _fault_behind(self, worker: Worker, end: Exit) -> str:
        """The fault that has ended ``worker``, so that nobody looks for another cause; "" if none has."""
        for number, fault in self._unseen.items():
            if fault.explains(worker.rank, end.code) and self.page.fired(number):
                return f"by --fault {self._unseen.pop(number)}"
        return ""

    def _note(self, failure: Failure, detail: str, *, quiet: bool = False) -> None:
        """Write ``failure`` down, count it, and say it unless (``quiet``) another rank reports it."""
        alike = self.retries.like(failure) if failure.error else []
        is_known = any(failure.kind == before.kind for before in self.retries.raised)
        text = str(failure).partition("\n")[0] if is_known else f"{failure}\n{detail}".rstrip()
        text += f", as rank {alike[0].rank}" if alike else ""
        if not quiet and not is_known:
            self.options.say(text)
        noticed_ns, fired_ns = time.monotonic_ns(), self.page.fired_ns
        injected = {"injected_ns": fired_ns} if fired_ns > self._noticed_ns else {}
        self.options.note({"event": "failure", "noticed_ns": noticed_ns, **injected, **failure.fields()})
        self._noticed_ns = noticed_ns
        self.retries.progressed(max(failure.step, self.pool.step))
        self.retries.add(failure, self.target)
        if is_known and not quiet:  # else the end of the run says it
            self.options.say(text)

    def _find_members(self) -> None:
        """Choose the workers of the next generation, and start those that are missing."""
        self._end_generation()
        others = [worker for worker in self.pool.living if worker not in self.members]
        # Those with a place first: it would be free for nobody else.
        others.sort(key=lambda worker: (worker.place is None, not worker.ready))
        self.members.sort(key=lambda worker: worker.rank_or_number)
        while len(self.members) > self.target:
            self.pool.dismiss(self.members.pop())
        while len(self.members) < self.target and others and (others[0].ready or not self._enough()):
            self.members.append(others.pop(0))
        while len(self.members) < self.target and not self._enough():
            self.members.append(self._start())
        self._give_places()
        missing = self.target - len(self.members) - len(others)
        for _ in range(missing):
            self._start_spare()  # it will be asked to join when it is ready

    def _free_places(self) -> list[int]:
        """The local ranks that no living worker has: those of lost ranks, whose GPUs are free."""
        taken = {worker.place for worker in self.pool.living}
        return [place for place in range(self.target) if place not in taken]

    def _give_places(self) -> None:
        """Give free places to members without one, then to spares, which join as soon as they are ready."""
        spares = [worker for worker in self.pool.living if worker not in self.members]
        without = [worker for worker in [*self.members, *spares] if worker.place is None]
        for worker, place in zip(without, self._free_places(), strict=False):
            worker.give_place(place)

    def _start(self) -> Worker:
        """One more worker, in a free place if there is one."""
        return self.pool.start(next(iter(self._free_places()), None), self.target)

    def _end_generation(self) -> None:
        """From now on the next generation is wanted."""
        if not self.forming:
            self._ended_at = time.monotonic()
        self.forming = True

    def _enough(self) -> bool:
        return 0 < self.options.min_ranks <= len(self.members)

    def _look(self) -> None:
        """Read the heartbeats; see whether it is time to grow, to shrink, or to have a spare."""
        self._looked = now = time.monotonic()
        self.retries.progressed(self.pool.step)
        wanted = self.generation + 1 if self.forming else self.generation
        over_s = now - self._ended_at
        only = self.members[0] if len(self.members) == 1 and not self.forming else None
        readings = {w.number: w.read(wanted, over_s, alone=w is only) for w in self.pool.living}
        found = find_stuck(readings, self.page.slowest_s, self.options.timeout_s)
        for worker in self.members:
            missed_s = 0.0 if worker.missed_since is None else now - worker.missed_since
            if worker.number in readings and not worker.ready and missed_s > MISSED_S:
                found.setdefault(worker.number, "never came where others waited for it")
        if found:
            self._kill_stuck(found, readings)
        self._resize()
        settled = not self.forming and now - self._assigned > SPARE_AFTER_S
        if settled and len(self.pool.living) == self.target:
            self._start_spare()

    def _kill_stuck(self, found: Mapping[int, str], readings: Mapping[int, Reading]) -> None:
        """Say where every worker is, then kill those in ``found``, for the reason there."""
        self.options.say(progress_table(self.pool.living, readings))
        pids = {worker.rank: worker.pid for worker in self.members if worker.rank >= 0}
        rows = statuses_of(pids)
        absent = [self.pool.workers[number].rank for number in found]
        self.options.say(status_table(rows, [rank for rank in absent if rank in pids]))
        told = {row.rank for row in rows if row.stack}
        for number, why in found.items():
            worker = self.pool.workers[number]
            self.page.excuse(worker.slot)
            worker.kill(why, ask=worker.rank not in told)

    def _resize(self) -> None:
        """Another number of ranks, if a fault says so or one that was missing is back."""
        for number, fault in enumerate(self.options.faults):
            settled = not self.forming and len(self.members) == self.target  # one change after the other
            due = fault.kind == "resize" and self.retries.step >= fault.step
            if settled and due and self.page.fire(number):
                self.target = fault.ranks
                self._give_places()
        ready = [w for w in self.pool.living if w.ready and w not in self.members]
        missing = self.target - len(self.members)
        if self.forming or not missing:
            return
        if missing < 0 or len(ready) >= missing:
            self.page.regroup = self.generation
        else:
            for _ in range(self.target - len(self.pool.living)):
                self._start_spare()

    def _start_spare(self) -> None:
        """One more worker, that the run can do without."""
        if self._spares_lost >= MAX_SPARES_LOST:
            return
        try:
            self._start()
        except OSError as error:
            self._spares_lost = MAX_SPARES_LOST
            self.options.say(f"no spare: {error}; a lost rank will wait for a new process")

    def _begin_generation(self) -> None:
        """Assign the ranks of the next generation, if all its members are ready."""
        ended = [worker.rank_or_number for worker in self.members if worker.finished is not None]
        # Before they meet they run on their own, and may all end without a loop.
        if ended and (self.generation or all(w.ready or w.finished is not None for w in self.members)):
            raise RunFailed(
                f"rank {ended[0]} has ended, and others go on: let all ranks end after the same step",
                self.retries.in_a_row,
            )
        if not all(worker.ready for worker in self.members):
            return
        if self.generation and len(self.members) != self.target:
            self._find_members()
            if not all(worker.ready for worker in self.members):
                return
        self._count_lost_group()
        self.generation += 1
        self.forming, self._lost, self._assigned = False, [], time.monotonic()
        self._member_failed = False
        self._give_places()
        ranks = _ranks([worker.rank for worker in self.members])
        store = MemoryFile.create()
        self._replace_store(store)
        if self.recovery is not None:
            self.recovery.assigned()  # before any of them is told: it may have made its step when all are
        for worker, rank in zip(self.members, ranks, strict=True):
            worker.missed_since = None
            worker.assign(
                Assignment(
                    self.generation,
                    rank,
                    len(self.members),
                    store,
                    self._snapshots.handles,
                    self.told or "",
                    worker.place or 0,
                )
            )

    def _count_lost_group(self) -> None:
        """Count it as a failure if all have left, for an error, a generation in which no worker failed."""
        errors = [message for message in self._lost if message.get("error")]
        if errors and not self._member_failed:
            first = max(errors, key=lambda message: len(message["error"]))  # one has the table of all ranks
            where = (first["rank"], first["pid"], self.generation, first["step"], first["phase"])
            shown, _, last = first["error"].rpartition("\n")
            if not shown.partition("\n")[0].endswith(last[-40:]):  # it would say the same again
                shown = first["error"]
            failure = Failure(*where, f"lost its group: {shown}", first["error"])
            self.recovery = self.recovery or Recovery(failure)
            self._note(failure, "")


def _is_final(error: ErrorRecord) -> bool:
    """A file that the user's code cannot read may be there when it tries again."""
    return error.type in FINAL and (error.is_ours or error.type.startswith("instep."))


def _ranks(before: Sequence[int]) -> list[int]:
    """The ranks of members that had ``before`` (-1: none): each keeps its own where that is possible."""
    taken = [rank if rank < len(before) and before.index(rank) == i else -1 for i, rank in enumerate(before)]
    left = iter(sorted(set(range(len(before))) - set(taken)))
    return [rank if rank >= 0 else next(left) for rank in taken]
