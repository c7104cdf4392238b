"""A run from config to exit code: claim its directory; then start ranks, or be one that was started."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

from instep.elastic.faults import parse_all
from instep.elastic.supervise import SuperviseOptions, supervise
from instep.mesh.agree import on_first_rank
from instep.mesh.join import init
from instep.mesh.launch_environment import detect
from instep.mesh.signals import listen_for_preemption
from instep.run import folder, loggers
from instep.run.claim import FaultLog, claim_together, how_to_go_on, say
from instep.run.generation import EXIT_CODES
from instep.run.recovery import Checkpoints
from instep.run.writer import require_readable
from instep.train.loop import generation
from instep.train.recipe import Recipe
from instep.train.run_config import check_ranks, check_rows, check_world, local_ranks, shard_axis
from instep.train.trainer import Trainer


def run(recipe: Recipe) -> int:
    """Train ``recipe`` on ranks that are already there or on ranks of this host.

    Returns the exit code: 0 when the last step is done, 75 when the run stopped before and wants to be
    resumed.
    """
    config = recipe.config
    recipe.validate()
    loggers.check(config.logs.names)
    faults = parse_all(config.fault)
    for fault in faults:
        check_ranks(config, fault.ranks)
    if detect(os.environ).source != "single":
        return run_rank(recipe)
    threads = config.parallel.strategy == "threads"
    ranks = 1 if threads else local_ranks(config, len(os.sched_getaffinity(0)))
    check_rows(ranks, config.parallel.shard_ranks)
    # The directory is claimed here, so that all ranks are told the same one.
    with folder.claim(config, say) as claimed, closing(FaultLog(claimed.path)) as log:
        require_readable(claimed.path)
        terms = SuperviseOptions(
            ranks=ranks,
            min_ranks=config.min_ranks,
            threads=config.parallel.threads,
            timeout_s=config.timeout_s,
            faults=faults,
            say=say,
            note=log.note,
        )
        try:
            code = supervise(recipe.work, (replace(config, run_dir=claimed.path),), terms)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f"{error}, {how_to_go_on(claimed.path)}") from error
        claimed.require_in_place()
        return code


def run_rank(recipe: Recipe) -> int:
    """One rank's part of a run that another launcher has started, which restarts all ranks if one is lost."""
    config = recipe.config
    place = detect(os.environ)
    mesh = init(
        shard=shard_axis(place.world_size, config.parallel.shard_ranks),
        backend=config.parallel.named_backend,
        timeout_s=config.timeout_s,
        threads=config.parallel.threads,
    )
    held: list[folder.Claimed] = []  # on rank 0, which holds the directory for all

    def look_again() -> None:
        for claimed in held:
            claimed.require_in_place()

    try:
        world = mesh.world.group

        def check() -> None:
            check_world(config, world.size, restarted=bool(place.restart_count))

        path, resume = claim_together(config, place, world, held.append, check)
        # A fault happens once, and a process that has been restarted cannot know which have.
        fault = () if place.restart_count else config.fault
        again = replace(config, run_dir=path, resume=resume, fault=fault)
        trainer = Trainer(recipe.replaced(again), mesh)
        asked: list[str] = []
        listen_for_preemption(asked.append)
        trainer.wishes = {"stop": lambda: bool(asked)}
        checkpoints = Checkpoints(path, config.timeout_s, trainer.heartbeat)
        ending = generation(trainer, path, checkpoints).run(trainer.step)
        on_first_rank(mesh.world.group, "looking for the run directory", look_again)
        trainer.leave()
        return EXIT_CODES[ending]
    finally:
        for claimed in held:
            claimed.release()
        mesh.close()
