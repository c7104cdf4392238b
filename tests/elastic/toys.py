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

from instep.elastic.faults import Injector, parse_all
from instep.elastic.member import Desk, Member, Seat
from instep.elastic.memory import Copy
from instep.elastic.signals import listen
from instep.errors import ContractBroken, PeerLost
from instep.mesh.child import leave

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
    remembers: bool = False  # in the memory copy, and nowhere else
    supervisor: int = 0  # its process id, for those who send it signals


def work(desk: Desk, script: Script) -> None:
    """A worker's life."""
    signal.alarm(ALARM_S)
    toy = Toy(Member(desk), script)
    toy.member.pulse.on_enter = toy.reach
    toy.member.pulse.enter("built")
    toy.live()
    leave(0)


class Toy:
    """One worker; ``step`` is -1 until it has a state."""

    def __init__(self, member: Member, script: Script) -> None:
        self.member, self.script = member, script
        self.step, self.seat = -1, Seat(0, -1, 0, "")
        self.injectors = [
            Injector(parse_all(script.faults), member.page),
            Injector(parse_all(script.always)),
        ]
        self.extra: Callable[[Toy, str], None] = globals()[script.extra] if script.extra else nothing
        self.copy: Copy | None = None
        listen(self.stop)

    def stop(self, name: str) -> None:
        self.member.page.stop = True

    def reach(self, phase: str, step: int) -> None:
        for injector in self.injectors:
            injector.rank = self.seat.rank
            injector.reach(phase, step)
        self.extra(self, phase)

    def log(self, what: str, **fields: object) -> None:
        """One line, written whole."""
        where = {"pid": os.getpid(), "generation": self.seat.generation, "rank": self.seat.rank}
        line = json.dumps({"what": what, **where, "step": self.step, **fields}) + "\n"
        file = os.open(self.script.directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def live(self) -> None:
        self.log("built")
        why: dict[str, object] = {}
        while (seat := self.member.sit(**why)) is not None:
            self.seat = seat
            self.log("sits", world_size=seat.world_size, memory=bool(seat.memory))
            code, why = None, {"rank": seat.rank, "pid": os.getpid()}
            try:
                code = self.train()
            except PeerLost as error:
                phase = self.member.page.position(self.member.pulse.worker).phase
                lost = {"step": self.step, "phase": phase, "ranks": list(error.ranks)}
                why |= {**lost, "error": f"PeerLost: {error}"}
            self.member.pulse.enter("lost")
            if code is not None:
                self.member.say("finished", code=code)
                return
        self.log("leaves")
        self.extra(self, "leaves")

    def train(self) -> int | None:
        """One generation: an exit code, or None if the ranks shall take other seats."""
        pulse, group = self.member.pulse, Group(self)
        self.agree(group)
        first = True
        while True:
            pulse.enter("forward")
            pulse.enter("exchange")
            if not group.count(self.step + 1):
                return None
            self.step += 1
            self.remember()
            pulse.enter("update")
            pulse.has(self.step)
            if first and not self.seat.rank:
                self.member.say("stepped", **group.told(self.step))
            first = False
            if self.member.page.stop:
                return 75
            if self.step >= self.script.steps and self.seat.generation >= self.script.generations:
                return 0

    def agree(self, group: Group) -> None:
        """Take the newest state of all."""
        self.member.pulse.enter("agree")
        if self.seat.memory and not self.seat.rank:
            self.copy = Copy.attach(self.seat.memory[-1].place)
            kept = int(self.copy.description() or b"0")
            self.log("found", kept=kept)
            group.newest = max(group.newest, kept)
        self.step = max(group.newest, 0)
        self.member.pulse.has(self.step)

    def remember(self) -> None:
        if not self.script.remembers or self.seat.rank:
            return
        new = self.copy is None
        self.copy = self.copy or Copy.create(64, 64)
        self.copy.write(str(self.step).encode(), [torch.full((4,), float(self.step))])
        if new:
            self.member.hand_over(self.copy)


class Group:
    """The ranks of one generation: who they are is in files beside its store."""

    def __init__(self, toy: Toy) -> None:
        self.toy, seat, page = toy, toy.seat, toy.member.page
        toy.member.pulse.enter("join")
        self.page, self.generation = page, seat.generation
        mine = Path(f"{seat.store}-{seat.rank}")
        told = [os.getpid(), toy.member.pulse.worker, toy.step]
        mine.with_suffix(".new").write_text(json.dumps(told))
        os.replace(mine.with_suffix(".new"), mine)
        peers = [json.loads(self._await(Path(f"{seat.store}-{rank}"))) for rank in range(seat.world_size)]
        self.newest = max(step for _, _, step in peers)
        self.slots = [slot for _, slot, _ in peers]
        self.pidfds = {self._open(rank, pid): rank for rank, (pid, _, _) in enumerate(peers)}
        self.counts = [Path(f"{seat.store}-{rank}-count") for rank in range(seat.world_size)]
        self.mine = os.open(self.counts[seat.rank], os.O_WRONLY | os.O_CREAT)

    def count(self, step: int) -> bool:
        """Wait until all ranks come to ``step``; whether they have, and nobody wants other seats."""
        leaves = self.toy.member.regroup
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
        return {"step": step, "source": "a toy", "world_size": self.toy.seat.world_size, **times}

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
    if (toy.seat.rank, toy.step, phase) == (1, 3, "forward"):
        raise ContractBroken("field threads: expected 1, got 2")


def loses_its_group(toy: Toy, phase: str) -> None:
    """Rank 1 says at step 2 that it has waited for rank 0 in vain, whoever lives."""
    if (toy.seat.rank, toy.step, phase) == (1, 2, "exchange"):
        raise PeerLost(f"rank 0 did not come, try {toy.seat.generation}", ranks=[0])


def never_asks_again(toy: Toy, phase: str) -> None:
    """Rank 0 of the first generation does not leave it in order."""
    if phase == "lost" and toy.seat.rank == 0 and toy.seat.generation == 1:
        while True:
            select.select([], [], [], PAUSE_S)


def grows_and_shrinks(toy: Toy, phase: str) -> None:
    """Nobody goes on from steps 3, 6 and 9 before the ranks have been asked to part."""
    generation = toy.seat.generation
    if (toy.step, phase) == (3 * generation, "exchange") and generation < toy.script.generations:
        while not toy.member.regroup:
            select.select([], [], [], PAUSE_S)


def lingers(toy: Toy, phase: str) -> None:
    """Nobody goes on from step 3 before somebody has to leave, and who has to leave does not end."""
    if phase == "leaves" or ((toy.step, toy.seat.generation, phase) == (3, 1, "exchange")):
        while phase == "leaves" or not toy.member.regroup:
            select.select([], [], [], PAUSE_S)


def spares_die(toy: Toy, phase: str) -> None:
    """Who has no seat, and was not there at the beginning, does not get as far as that."""
    if phase == "built" and toy.member.pulse.worker >= 2:
        os.kill(os.getpid(), signal.SIGKILL)


def spares_raise(toy: Toy, phase: str) -> None:
    """The same, with words."""
    if phase == "built" and toy.member.pulse.worker >= 2:
        raise ImportError("the code has changed")


def says_much_and_leaves(toy: Toy, phase: str) -> None:
    """Rank 1 dies; when that is known rank 0 says that the run is finished, after other things, and ends."""
    if (toy.step, phase) != (2, "forward"):
        return
    if toy.seat.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (toy.script.directory / SAID).exists():
        select.select([], [], [], PAUSE_S)
    for _ in range(3):
        toy.member.say("nothing of importance")
    toy.member.say("finished", code=7)
    leave(0)


def waits_for_a_spare(toy: Toy, phase: str) -> None:
    """Rank 1 dies at step 2, once there is somebody else."""
    if (toy.step, toy.seat.rank, toy.seat.generation, phase) == (2, 1, 1, "forward"):
        while (toy.script.directory / LOG).read_text().count('"built"') < 3:
            select.select([], [], [], PAUSE_S)
        os.kill(os.getpid(), signal.SIGKILL)


def waits_for_dead_spares(toy: Toy, phase: str) -> None:
    """Spares die, and rank 1 does not go on from step 2 before their supervisor has said so three times."""
    path = toy.script.directory / SAID
    spares_die(toy, phase)
    if (toy.step, toy.seat.rank, phase) == (2, 1, "exchange"):
        while not path.exists() or path.read_text().count("a spare") < 3:
            select.select([], [], [], PAUSE_S)


def asks_to_end(toy: Toy, phase: str) -> None:
    """Rank 0 sends the supervisor a signal at step 3."""
    if (toy.step, toy.seat.rank, phase) == (3, 0, "exchange"):
        os.kill(toy.script.supervisor, signal.SIGTERM)
        while not toy.member.page.stop:
            select.select([], [], [], PAUSE_S)


def insists(toy: Toy, phase: str) -> None:
    """It sends another one, and does not end the step."""
    asks_to_end(toy, phase)
    if (toy.step, toy.seat.rank, phase) == (3, 0, "exchange"):
        os.kill(toy.script.supervisor, signal.SIGTERM)
        while True:
            select.select([], [], [], PAUSE_S)


def hands_over_and_dies(toy: Toy, phase: str) -> None:
    """Rank 1 dies; when that is known, rank 0 hands its memory copy over and dies, too."""
    if (toy.step, phase, toy.seat.generation) != (2, "forward", 1):
        return
    while not toy.seat.rank and not (toy.script.directory / SAID).exists():
        select.select([], [], [], PAUSE_S)
    if not toy.seat.rank:
        copy = Copy.create(64, 64)
        copy.write(b"2", [torch.zeros(4)])
        toy.member.hand_over(copy)
    os.kill(os.getpid(), signal.SIGKILL)
