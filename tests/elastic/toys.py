"""Workers without a model: they meet in files, count steps in the shared page, and misbehave on command.

A step is made when all ranks of a generation have counted it. A rank learns that another has died from its
pidfd, as the real ones do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from instep.elastic.faults import FaultInjector, parse_all
from instep.elastic.rendezvous import Assignment, ControlChannel, WorkerSpec
from instep.elastic.snapshot import Snapshot
from instep.errors import ContractBroken, PeerLost
from instep.launch.memory_file import MemoryFile
from instep.launch.rank_process import exit_now
from instep.launch.signals import listen_for_preemption

NOWHERE = MemoryFile(0, 0, 0)
ALARM_S = 25  # no test waits longer for a toy that hangs
PAUSE_S = 0.001
LOG, SAID = "log", "said"


@dataclass(frozen=True)
class Script:
    """What the workers of one run do: ``steps`` of them, and on until generation number ``generations``.

    ``faults`` happen once in the run, ``always`` in each process anew. ``extra`` is the name of a function of
    this module that is called at each phase.
    """

    directory: Path
    steps: int = 5
    generations: int = 1
    faults: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    extra: str = ""
    remembers: bool = False  # in the snapshot, and nowhere else
    supervisor: int = 0  # its process id, for those who send it signals


def work(spec: WorkerSpec, script: Script) -> None:
    """A worker's life."""
    signal.alarm(ALARM_S)
    toy = Toy(ControlChannel(spec), script)
    toy.channel.heartbeat.on_enter = toy.reach
    toy.channel.heartbeat.enter("built")
    toy.live()
    exit_now(0)


class Toy:
    """One worker; ``step`` is -1 until it has a state."""

    def __init__(self, channel: ControlChannel, script: Script) -> None:
        self.channel, self.script = channel, script
        self.step, self.assignment = -1, Assignment(0, -1, 0, NOWHERE)
        self.injectors = [
            FaultInjector(parse_all(script.faults), channel.page),
            FaultInjector(parse_all(script.always)),
        ]
        self.extra: Callable[[Toy, str], None] = globals()[script.extra] if script.extra else nothing
        self.snapshot: Snapshot | None = None
        listen_for_preemption(self.stop)

    def stop(self, name: str) -> None:
        self.channel.page.stop = True

    def reach(self, phase: str, step: int) -> None:
        for injector in self.injectors:
            injector.rank = self.assignment.rank
            injector.reach(phase, step)
        self.extra(self, phase)

    def log(self, what: str, **fields: object) -> None:
        """One line, written whole."""
        where = {"pid": os.getpid(), "generation": self.assignment.generation, "rank": self.assignment.rank}
        line = json.dumps({"what": what, **where, "step": self.step, **fields}) + "\n"
        file = os.open(self.script.directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def live(self) -> None:
        self.log("built")
        why: dict[str, object] = {}
        while (assignment := self.channel.next_assignment(**why)) is not None:
            self.assignment = assignment
            self.log("joins", world_size=assignment.world_size, memory=bool(assignment.memory))
            code, why = None, {"rank": assignment.rank, "pid": os.getpid()}
            try:
                code = self.train()
            except PeerLost as error:
                phase = self.channel.page.position(self.channel.heartbeat.worker).phase
                lost = {"step": self.step, "phase": phase, "ranks": list(error.ranks)}
                why |= {**lost, "error": f"PeerLost: {error}"}
            self.channel.heartbeat.enter("lost")
            if code is not None:
                self.channel.say("finished", code=code)
                return
        self.log("leaves")
        self.extra(self, "leaves")

    def train(self) -> int | None:
        """One generation: an exit code, or None if the ranks shall form another group."""
        heartbeat, group = self.channel.heartbeat, Group(self)
        self.agree(group)
        first = True
        while True:
            heartbeat.enter("forward")
            heartbeat.enter("exchange")
            if not group.count(self.step + 1):
                return None
            self.step += 1
            self.remember()
            heartbeat.enter("update")
            heartbeat.set_step(self.step)
            if first and not self.assignment.rank:
                self.channel.say("stepped", **group.told(self.step))
            first = False
            if self.channel.page.stop:
                return 75
            if self.step >= self.script.steps and self.assignment.generation >= self.script.generations:
                return 0

    def agree(self, group: Group) -> None:
        """Take the newest state of all."""
        self.channel.heartbeat.enter("agree")
        if self.assignment.memory and not self.assignment.rank:
            self.snapshot = Snapshot.attach(self.assignment.memory[-1].place)
            step = int(self.snapshot.description() or b"0")
            self.log("found", step=step)
            group.newest = max(group.newest, step)
        self.step = max(group.newest, 0)
        self.channel.heartbeat.set_step(self.step)

    def remember(self) -> None:
        if not self.script.remembers or self.assignment.rank:
            return
        new = self.snapshot is None
        self.snapshot = self.snapshot or Snapshot.create(64, 64)
        self.snapshot.write(str(self.step).encode(), [torch.full((4,), float(self.step))])
        if new:
            self.channel.hand_over(self.snapshot)


class Group:
    """The ranks of one generation: who they are is in files of its own."""

    def __init__(self, toy: Toy) -> None:
        self.toy, assignment, page = toy, toy.assignment, toy.channel.page
        toy.channel.heartbeat.enter("join")
        self.page, self.generation = page, assignment.generation
        store = toy.script.directory / f"generation-{assignment.generation}"
        mine = Path(f"{store}-{assignment.rank}")
        told = [os.getpid(), toy.channel.heartbeat.worker, toy.step]
        mine.with_suffix(".new").write_text(json.dumps(told))
        os.replace(mine.with_suffix(".new"), mine)
        peers = [json.loads(self._await(Path(f"{store}-{rank}"))) for rank in range(assignment.world_size)]
        self.newest = max(step for _, _, step in peers)
        self.slots = [slot for _, slot, _ in peers]
        self.pidfds = {self._open(rank, pid): rank for rank, (pid, _, _) in enumerate(peers)}
        self.counts = [Path(f"{store}-{rank}-count") for rank in range(assignment.world_size)]
        self.mine = os.open(self.counts[assignment.rank], os.O_WRONLY | os.O_CREAT)

    def count(self, step: int) -> bool:
        """Wait until all ranks come to ``step``; whether they have, and none has been asked to regroup."""
        leaves = self.toy.channel.regroup
        os.pwrite(self.mine, (-step if leaves else step).to_bytes(8, "little", signed=True), 0)
        for rank, path in enumerate(self.counts):
            while abs(told := self._told(path)) < step:
                gone = self._look(rank)
                if gone and abs(self._told(path)) < step:  # it may have come and gone
                    raise PeerLost(f"rank {rank} has gone from generation {self.generation}", ranks=gone)
            leaves |= told == -step
        return not leaves

    def told(self, step: int) -> dict[str, object]:
        now = time.monotonic_ns()
        times = {f"{name}_ns": now for name in ("joined", "agreed", "stepped")}
        return {"step": step, "source": "a toy", "world_size": self.toy.assignment.world_size, **times}

    def _told(self, path: Path) -> int:
        try:
            return int.from_bytes(path.read_bytes(), "little", signed=True)
        except FileNotFoundError:
            return 0

    def _look(self, rank: int) -> list[int]:
        """Let a moment pass; ``rank`` if it is dead or has left this group."""
        dead = select.select(list(self.pidfds), [], [], PAUSE_S)[0]
        left = self.page.position(self.slots[rank]).phase in ("lost", "built")
        return [rank] if left or rank in map(self.pidfds.get, dead) else []

    def _open(self, rank: int, pid: int) -> int:
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerLost(f"rank {rank} has gone before it was known", ranks=[rank]) from None

    def _await(self, path: Path) -> str:
        while not path.exists():
            select.select([], [], [], PAUSE_S)
        return path.read_text()


def nothing(toy: Toy, phase: str) -> None:
    """The behaviour of most."""


def contract(toy: Toy, phase: str) -> None:
    """Rank 1 finds at step 3 that nothing can go on; everybody else sees it die."""
    if (toy.assignment.rank, toy.step, phase) == (1, 3, "forward"):
        raise ContractBroken("field threads: expected 1, got 2")


def loses_its_group(toy: Toy, phase: str) -> None:
    """Rank 1 says at step 2 that it has waited for rank 0 in vain, whoever lives."""
    if (toy.assignment.rank, toy.step, phase) == (1, 2, "exchange"):
        raise PeerLost(f"rank 0 did not come, try {toy.assignment.generation}", ranks=[0])


def never_asks_again(toy: Toy, phase: str) -> None:
    """Rank 0 of the first generation does not leave it in order."""
    if phase == "lost" and toy.assignment.rank == 0 and toy.assignment.generation == 1:
        while True:
            select.select([], [], [], PAUSE_S)


def save_once(toy: Toy, phase: str) -> None:
    """Rank 1 saves its state after step 3; none ever has before."""
    if (toy.assignment.rank, toy.step, phase) == (1, 3, "update"):
        toy.channel.heartbeat.enter("save")


def save_for_long(toy: Toy, phase: str) -> None:
    """Rank 1 does so for a second, and makes progress."""
    save_once(toy, phase)
    if phase == "save":
        until = time.monotonic() + 1
        while time.monotonic() < until:
            toy.channel.heartbeat.beat()


def grows_and_shrinks(toy: Toy, phase: str) -> None:
    """Nobody goes on from steps 3, 6 and 9 before the ranks have been asked to part."""
    generation = toy.assignment.generation
    if (toy.step, phase) == (3 * generation, "exchange") and generation < toy.script.generations:
        while not toy.channel.regroup:
            select.select([], [], [], PAUSE_S)


def lingers(toy: Toy, phase: str) -> None:
    """Nobody goes on from step 3 before somebody has to leave, and who has to leave does not end."""
    if phase == "leaves" or ((toy.step, toy.assignment.generation, phase) == (3, 1, "exchange")):
        while phase == "leaves" or not toy.channel.regroup:
            select.select([], [], [], PAUSE_S)


def spares_die(toy: Toy, phase: str) -> None:
    """A worker that was not there at the beginning dies before it is ready."""
    if phase == "built" and toy.channel.heartbeat.worker >= 2:
        os.kill(os.getpid(), signal.SIGKILL)


def one_spare_cannot_read(toy: Toy, phase: str) -> None:
    """The first worker that was not there at the beginning does not find the data."""
    if phase == "built" and toy.channel.heartbeat.worker == 2:
        raise FileNotFoundError("expected a data file, got gone.txt, which does not exist")


def no_spare_can_read(toy: Toy, phase: str) -> None:
    """No worker that was not there at the beginning does."""
    if phase == "built" and toy.channel.heartbeat.worker >= 2:
        raise FileNotFoundError("expected a data file, got gone.txt, which does not exist")


def says_much_and_leaves(toy: Toy, phase: str) -> None:
    """Rank 1 dies; when that is known rank 0 says that the run is finished, after other things, and ends."""
    if (toy.step, phase) != (2, "forward"):
        return
    if toy.assignment.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (toy.script.directory / SAID).exists():
        select.select([], [], [], PAUSE_S)
    for _ in range(3):
        toy.channel.say("nothing of importance")
    toy.channel.say("finished", code=7)
    exit_now(0)


def asks_for_its_place(toy: Toy, phase: str) -> None:
    """Each asks before it is ready, as a script that reads its device; rank 1 waits for a spare to ask."""
    if phase == "built":
        toy.log("asks")
        toy.log("place", place=toy.channel.place())
    if (toy.assignment.rank, toy.step, toy.assignment.generation, phase) == (1, 1, 1, "exchange"):
        while (toy.script.directory / LOG).read_text().count('"asks"') < 5:
            select.select([], [], [], PAUSE_S)
        toy.log("goes on")


def waits_for_a_spare(toy: Toy, phase: str) -> None:
    """Rank 1 dies at step 2, once there is somebody else."""
    if (toy.step, toy.assignment.rank, toy.assignment.generation, phase) == (2, 1, 1, "forward"):
        while (toy.script.directory / LOG).read_text().count('"built"') < 3:
            select.select([], [], [], PAUSE_S)
        os.kill(os.getpid(), signal.SIGKILL)


def waits_for_dead_spares(toy: Toy, phase: str) -> None:
    """Spares die, and rank 1 does not go on from step 2 before their supervisor has said so three times."""
    path = toy.script.directory / SAID
    spares_die(toy, phase)
    if (toy.step, toy.assignment.rank, phase) == (2, 1, "exchange"):
        while not path.exists() or path.read_text().count(" spare") < 3:
            select.select([], [], [], PAUSE_S)


def asks_to_end(toy: Toy, phase: str) -> None:
    """Rank 0 sends the supervisor a signal at step 3."""
    if (toy.step, toy.assignment.rank, phase) == (3, 0, "exchange"):
        os.kill(toy.script.supervisor, signal.SIGTERM)
        while not toy.channel.page.stop:
            select.select([], [], [], PAUSE_S)


def insists(toy: Toy, phase: str) -> None:
    """It sends another one, and does not end the step."""
    asks_to_end(toy, phase)
    if (toy.step, toy.assignment.rank, phase) == (3, 0, "exchange"):
        os.kill(toy.script.supervisor, signal.SIGTERM)
        while True:
            select.select([], [], [], PAUSE_S)


def hands_over_and_dies(toy: Toy, phase: str) -> None:
    """Rank 1 dies; when that is known, rank 0 hands its snapshot over and dies, too."""
    if (toy.step, phase, toy.assignment.generation) != (2, "forward", 1):
        return
    while not toy.assignment.rank and not (toy.script.directory / SAID).exists():
        select.select([], [], [], PAUSE_S)
    if not toy.assignment.rank:
        snapshot = Snapshot.create(64, 64)
        snapshot.write(b"2", [torch.zeros(4)])
        toy.channel.hand_over(snapshot)
    os.kill(os.getpid(), signal.SIGKILL)
