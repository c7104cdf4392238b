"""A worker's life under the supervisor: build, sit down, train, lose a peer, sit down again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from instep.elastic.member import Desk, Member, Seat
from instep.elastic.signals import listen
from instep.elastic.store import WatchedStore
from instep.errors import Desync, InstepError, PeerLost
from instep.mesh.child import leave
from instep.mesh.join import meet
from instep.train.config import Config
from instep.train.keep import Checkpoints, MemoryCopy
from instep.train.loop import Ending
from instep.train.part import Part
from instep.train.rows import shard_axis
from instep.train.trainer import Trainer

EXIT_CODES = {Ending.DONE: 0, Ending.STOPPED: 75}
MESSAGE_CHARACTERS = 4096


def work(desk: Desk, config: Config) -> None:
    """Train as ``config`` says, in whatever seats the supervisor gives."""
    assert config.run_dir is not None
    member = Member(desk)

    def stop(name: str) -> None:
        member.page.stop = True

    listen(stop)
    trainer = Trainer(config, pulse=member.pulse)
    trainer.injector.rank = -1  # not one yet
    memory = MemoryCopy(member)
    trainer.wishes = {
        "stop": lambda: member.page.stop,
        "regroup": lambda: member.regroup,
        "copy": lambda: memory.due(trainer),
    }
    if not torch.cuda.is_available():
        trainer.prepare()
    checkpoints = Checkpoints(config.run_dir, config.timeout_s)
    part = Part(trainer, config.run_dir, checkpoints, memory)
    trainer.pulse.enter("built")
    why: dict[str, Any] = {}
    while (seat := member.sit(**why)) is not None:
        ending, why = _sit(part, member, seat)
        trainer.pulse.enter("lost")
        trainer.leave()
        if ending in EXIT_CODES:
            member.say("finished", code=EXIT_CODES[ending])
            break
    with suppress(Exception):  # a worker that is not needed any more may still have something to write
        checkpoints.close()
    leave(0)


def _sit(part: Part, member: Member, seat: Seat) -> tuple[Ending, dict[str, Any]]:
    """One generation; what there is to say if it did not end the run."""
    trainer, times = part.trainer, dict[str, Any]()
    where = {"rank": seat.rank, "pid": os.getpid()}

    def agreed(source: str) -> None:
        times.update(agreed_ns=time.monotonic_ns(), source=source)

    def stepped() -> None:
        told = {"step": trainer.steps_done, "world_size": seat.world_size, "stepped_ns": time.monotonic_ns()}
        if seat.rank == 0:
            member.say("stepped", **times, **told)

    part.agreed, part.stepped = agreed, stepped
    trainer.generation, trainer.injector.rank = seat.generation, seat.rank
    trainer.pulse.enter("join")
    try:
        assert part.memory is not None
        part.memory.take_over(seat.memory)
        _join(trainer, seat, member)
        times.update(joined_ns=time.monotonic_ns())
        ending = part.run()
    except RuntimeError as error:
        phase = member.page.position(member.pulse.worker).phase
        lost = isinstance(error, PeerLost | Desync | dist.DistError)
        # While ranks meet, a backend may say in words of its own that one of them has gone.
        if not lost and (phase != "join" or isinstance(error, InstepError) or not member.over_soon()):
            raise
        state = {"step": trainer.steps_done, "phase": phase, "ranks": list(getattr(error, "ranks", ()))}
        text = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        return Ending.REGROUP, {**where, **state, "error": text}
    return ending, where


def _join(trainer: Trainer, seat: Seat, member: Member) -> None:
    config, store = trainer.config, None
    if seat.world_size > 1:
        file = dist.FileStore(seat.store, seat.world_size)
        store = WatchedStore(file, lambda: member.is_over, config.timeout_s)
    mesh = meet(
        store,
        seat.rank,
        seat.world_size,
        backend=config.parallel.named_backend,
        timeout_s=config.timeout_s,
        threads=config.parallel.threads,
        local_rank=seat.rank,
        shard=shard_axis(seat.world_size, config.parallel.shard_ranks),
    )
    trainer.join(mesh)
