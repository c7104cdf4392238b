"""A worker's life under the supervisor: build, take a rank, train, lose a peer, take a rank again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instep.checkpoint.manifest import differences
from instep.elastic.log_store import LogStore
from instep.elastic.rendezvous import Assignment, ControlChannel, WatchedStore, WorkerSpec
from instep.errors import ContractBroken, Desync, InstepError, PeerLost, let_go
from instep.mesh.join import meet
from instep.mesh.rank_process import exit_now
from instep.mesh.signals import listen_for_preemption
from instep.run.generation import EXIT_CODES, Ending, Generation
from instep.run.recovery import Checkpoints, Snapshots
from instep.run.writer import starts
from instep.train.loop import generation
from instep.train.recipe import Recipe
from instep.train.run_config import shard_axis
from instep.train.trainer import Trainer

MESSAGE_CHARACTERS = 4096


def work(spec: WorkerSpec, recipe: Recipe) -> None:
    """Train ``recipe`` under whatever ranks the supervisor assigns to this process."""
    config = recipe.config
    assert config.run_dir is not None
    try:
        member = ControlChannel(spec)
    except FileNotFoundError:  # the supervisor, which holds what it opens, has been killed meanwhile
        exit_now(0)

    def stop(name: str) -> None:
        member.page.stop = True

    listen_for_preemption(stop)
    trainer = Trainer(recipe, heartbeat=member.heartbeat)
    trainer.injector.rank = -1  # no rank yet
    memory = Snapshots(member)
    trainer.wishes = {
        "stop": lambda: member.page.stop,
        "regroup": lambda: member.regroup,
        "copy": lambda: memory.due(trainer),
    }
    trainer.prepare()  # a process that says that it is ready can do without a group all that it has to
    _require_contract(trainer, member.page.contract, config.run_dir)
    checkpoints = Checkpoints(config.run_dir, config.timeout_s, member.heartbeat)
    part = generation(trainer, config.run_dir, checkpoints, memory)
    trainer.heartbeat.enter("built")
    why: dict[str, Any] = {}
    while (assignment := member.next_assignment(**why)) is not None:
        ending, why = _take_part(part, trainer, member, assignment)
        trainer.heartbeat.enter("lost")
        trainer.leave()
        if ending in EXIT_CODES:
            member.say("finished", code=EXIT_CODES[ending])
            break
    with suppress(Exception):  # a worker that is not needed any more may still have something to write
        checkpoints.close()
    exit_now(0)


def _take_part(
    part: Generation, trainer: Trainer, member: ControlChannel, assignment: Assignment
) -> tuple[Ending, dict[str, Any]]:
    """One generation; what there is to say if it did not end the run."""
    times = dict[str, Any]()
    where = {"rank": assignment.rank, "pid": os.getpid()}

    def agreed(source: str) -> None:
        times.update(agreed_ns=time.monotonic_ns(), source=source)
        if assignment.rank == 0:
            member.page.contract = trainer.contract_number

    def stepped() -> None:
        told = {
            "step": trainer.steps_done,
            "world_size": assignment.world_size,
            "stepped_ns": time.monotonic_ns(),
        }
        if assignment.rank == 0:
            member.say("stepped", **times, **told)

    part.agreed, part.stepped = agreed, stepped
    trainer.generation, trainer.injector.rank = assignment.generation, assignment.rank
    trainer.heartbeat.enter("join")
    try:
        assert part.memory is not None
        part.memory.take_over(assignment.memory)
        _join(trainer, assignment, member)
        times.update(joined_ns=time.monotonic_ns())
        ending = part.run(trainer.step)
    except RuntimeError as error:
        phase = member.page.position(member.heartbeat.worker).phase
        lost = isinstance(error, PeerLost | Desync | dist.DistError)
        # While ranks meet, a backend may say in words of its own that one of them has gone.
        if not lost and (phase != "join" or isinstance(error, InstepError) or not member.is_over_soon()):
            raise
        state = {"step": trainer.steps_done, "phase": phase, "ranks": list(getattr(error, "ranks", ()))}
        text = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        let_go(error)  # else it would hold what this rank is about to leave
        return Ending.REGROUP, {**where, **state, "error": text}
    return ending, where


def _require_contract(trainer: Trainer, number: int, path: Path) -> None:
    """ContractBroken unless this process would compute the bits of the run, whose ranks have agreed on
    contract ``number``; 0: they have not yet, and will compare with this one.

    Where they were told, when it has a seat, all of them would raise.
    """
    if number == 0 or trainer.contract_number in (0, number):
        return
    lines: list[str] = []
    with suppress(OSError, ValueError):  # for words alone
        run = starts(path)[-1:]
        lines = differences(run[0]["numerical"], trainer.contract, ("in the run", "now")) if run else []
    why = (
        f"make these what they were: {'; '.join(lines)}" if lines else "from the same numbers: try its cores"
    )
    raise ContractBroken(f"it would compute other bits than the ranks of the run, and takes no part; {why}")


def _join(trainer: Trainer, assignment: Assignment, member: ControlChannel) -> None:
    config, store = trainer.config, None
    if assignment.world_size > 1:
        store = WatchedStore(LogStore(assignment.store), lambda: member.is_over, config.timeout_s)
    mesh = meet(
        store,
        assignment.rank,
        assignment.world_size,
        backend=config.parallel.named_backend,
        timeout_s=config.timeout_s,
        threads=config.parallel.threads,
        local_rank=assignment.rank,
        shard=shard_axis(assignment.world_size, config.parallel.shard_ranks),
    )
    trainer.join(mesh)
