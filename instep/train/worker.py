"""A worker's life under the supervisor: build, take a rank, train, lose a peer, take a rank again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from instep.elastic.rendezvous import WorkerSpec
from instep.mesh.rank_process import exit_now
from instep.run.generation import EXIT_CODES, Ending, Generation
from instep.run.membership import Membership, require_contract, supervised
from instep.run.recovery import Checkpoints, Snapshots
from instep.train.loop import generation
from instep.train.recipe import Recipe
from instep.train.run_config import shard_axis
from instep.train.trainer import Trainer


def work(spec: WorkerSpec, recipe: Recipe) -> None:
    """Train ``recipe`` under whatever ranks the supervisor assigns to this process."""
    config = recipe.config
    assert config.run_dir is not None
    channel = supervised(spec)
    trainer = Trainer(recipe, heartbeat=channel.heartbeat)
    trainer.injector.rank = -1  # no rank yet
    memory = Snapshots(channel)
    trainer.wishes = {
        "stop": lambda: channel.page.stop,
        "regroup": lambda: channel.regroup,
        "copy": lambda: memory.due(trainer),
    }
    trainer.prepare()  # a process that says that it is ready can do without a group all that it has to
    require_contract(trainer.contract, trainer.contract_number, channel.page.contract, config.run_dir)
    checkpoints = Checkpoints(config.run_dir, config.timeout_s, channel.heartbeat)
    part = generation(trainer, config.run_dir, checkpoints, memory)
    member = Membership(channel, trainer)
    trainer.heartbeat.enter("built")
    why: dict[str, Any] = {}
    while (assignment := channel.next_assignment(**why)) is not None:
        member.take(assignment)
        trainer.injector.rank = assignment.rank
        memory.take_over(assignment.memory)
        ending, why = _take_part(part, trainer, member)
        trainer.heartbeat.enter("lost")
        trainer.leave()
        if ending in EXIT_CODES:
            channel.say("finished", code=EXIT_CODES[ending])
            break
    with suppress(Exception):  # a worker that is not needed any more may still have something to write
        checkpoints.close()
    exit_now(0)


def _take_part(part: Generation, trainer: Trainer, member: Membership) -> tuple[Ending, dict[str, Any]]:
    """One generation; what there is to say if it did not end the run."""
    config = trainer.config
    part.stepped = member.stepped
    part.agreed = lambda source: member.agreed(source, trainer.contract_number)
    try:
        mesh = member.meet(
            backend=config.parallel.named_backend,
            timeout_s=config.timeout_s,
            threads=config.parallel.threads,
            local_rank=member.rank,
            shard=shard_axis(member.world_size, config.parallel.shard_ranks),
        )
        trainer.join(mesh)
        member.joined()
        ending = part.run(trainer.step)
    except RuntimeError as error:
        return Ending.REGROUP, member.parted(error)
    return ending, member.where
