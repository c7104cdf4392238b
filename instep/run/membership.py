"""How a process takes part in a supervised run: one rank in each generation, and why it has lost it."""

from __future__ import annotations

import os
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instep.checkpoint.contract import changes, way_out
from instep.elastic.log_store import LogStore
from instep.elastic.rendezvous import Assignment, ControlChannel, WorkerSpec
from instep.errors import ContractBroken, Desync, InstepError, PeerLost, clear_tracebacks
from instep.launch.rank_process import exit_now
from instep.launch.signals import listen_for_preemption
from instep.mesh.join import join_store
from instep.mesh.mesh import Mesh
from instep.record.step_lines import starts
from instep.run.script_training import ScriptTraining

MESSAGE_CHARACTERS = 4096
LOSSES = (PeerLost, Desync, dist.DistError)
"""What is raised where ranks that need each other have parted."""


def supervised(spec: WorkerSpec) -> ControlChannel:
    """The channel to the supervisor that has started this process, which ends if that has been killed; a
    signal that asks it to end is told to all."""
    try:
        channel = ControlChannel(spec)
    except FileNotFoundError:  # the supervisor, which holds what it opens, has been killed meanwhile
        exit_now(0)

    def stop(name: str) -> None:
        channel.page.stop = True

    listen_for_preemption(stop)
    return channel


class Membership:
    """A process's part in a run, generation by generation; ``channel`` leads to its supervisor.

    ``take`` an assignment, ``join`` its mesh, train; after a loss ``parted`` says what the supervisor is to
    be told with the question for the next assignment.
    """

    def __init__(self, channel: ControlChannel, training: ScriptTraining) -> None:
        self.channel, self.training = channel, training
        self._times = dict[str, Any]()

    def take(self, assignment: Assignment) -> None:
        """This process is to be a rank of the next generation."""
        self._assignment, self._times = assignment, {}
        self.training.generation = assignment.generation
        self.training.heartbeat.enter("join")

    def meet(self, timeout_s: float, **options: Any) -> Mesh:
        """A mesh of the ranks of this generation; ``options`` as of ``join_store``. Collective."""
        assignment, store = self._assignment, None
        if assignment.world_size > 1:
            store = LogStore(assignment.store, lambda: self.channel.is_over, timeout_s)
        ranks, place = (assignment.rank, assignment.world_size), assignment.place
        return join_store(store, *ranks, timeout_s=timeout_s, local_rank=place, **options)

    def joined(self) -> None:
        """The ranks have met, and what was registered has joined them."""
        self._times["joined_ns"] = time.monotonic_ns()

    def agreed(self, source: str) -> None:
        """All have the state, which came from ``source``, under one contract."""
        self._times.update(agreed_ns=time.monotonic_ns(), source=source)
        if self._assignment.rank == 0:
            self.channel.page.contract = self.training.contract_number

    def stepped(self) -> None:
        """The first step of this generation is made."""
        told = {
            "step": self.training.steps_done,
            "world_size": self._assignment.world_size,
            "stepped_ns": time.monotonic_ns(),
        }
        if self._assignment.rank == 0:
            self.channel.say("stepped", **self._times, **told)

    @property
    def rank(self) -> int:
        """In this generation."""
        return self._assignment.rank

    @property
    def world_size(self) -> int:
        """Of this generation."""
        return self._assignment.world_size

    @property
    def where(self) -> dict[str, Any]:
        """Who this is, for the supervisor."""
        return {"rank": self._assignment.rank, "pid": os.getpid()}

    def parted(self, error: BaseException) -> dict[str, Any]:
        """What to tell of ``error``, if it is the loss of a rank; it holds nothing any more. Any other one is
        raised."""
        phase = self.channel.page.position(self.channel.heartbeat.worker).phase
        lost = isinstance(error, LOSSES)
        # A backend says in words of its own that a rank has gone: while ranks meet, and in a collective of
        # the user's own.
        is_foreign = isinstance(error, RuntimeError) and not isinstance(error, InstepError)
        may_be_lost = is_foreign and (phase == "join" or _is_of_torchs_groups(error))
        if not lost and not (may_be_lost and self.channel.is_over_soon()):
            raise error
        ranks = list(getattr(error, "ranks", ()))
        text = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        clear_tracebacks(error)  # else it would hold what this rank is about to leave
        return {**self.where, "step": self.training.steps_done, "phase": phase, "ranks": ranks, "error": text}


def _is_of_torchs_groups(error: BaseException) -> bool:
    """Whether it was raised in a call of ``torch.distributed``."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("torch.distributed.") for name in names)


def require_contract(contract: dict[str, Any], own: int, number: int, path: Path) -> None:
    """ContractBroken unless this process, whose ``contract`` has the number ``own``, would compute the bits
    of the run in ``path``, whose ranks have agreed on ``number``; 0: not yet, and will compare with this one.

    Where they were told, when it has a seat, all of them would raise.
    """
    if number in (0, own):
        return
    lines: list[str] = []
    with suppress(OSError, ValueError):  # for words alone
        run = starts(path)[-1:]
        if run:
            refused, warned, _ = changes(run[0]["numerical"], contract, ("in the run", "now"))
            lines = [*refused, *warned]
    differ = f"; {way_out(lines)}: {'; '.join(lines)}" if lines else ""
    raise ContractBroken(f"not admitted: its numerical configuration differs from the run's{differ}")
