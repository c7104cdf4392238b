"""A run from config to exit code: claim its directory; then start ranks, or be one that was started."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from instep.checkpoint.files import step_directories
from instep.elastic.faults import parse_all
from instep.elastic.supervise import SuperviseOptions, supervise
from instep.mesh.agree import on_first_rank, require_same_lines
from instep.mesh.join import init
from instep.mesh.launch_environment import LAUNCH_DIGITS, LaunchEnvironment, detect
from instep.mesh.process_group import Group
from instep.mesh.signals import listen_for_preemption
from instep.run import folder, loggers
from instep.run.folder import FAULTS
from instep.run.generation import EXIT_CODES
from instep.run.jsonl import EVENTS, JsonLines
from instep.run.recovery import Checkpoints
from instep.run.writer import require_readable
from instep.train.loop import generation
from instep.train.recipe import Recipe
from instep.train.run_config import RunConfig, check_ranks, check_rows, check_world, local_ranks, shard_axis
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
    with folder.claim(config, _say) as claimed, closing(_FaultLog(claimed.path)) as log:
        require_readable(claimed.path)
        terms = SuperviseOptions(
            ranks=ranks,
            min_ranks=config.min_ranks,
            threads=config.parallel.threads,
            timeout_s=config.timeout_s,
            faults=faults,
            say=_say,
            note=log.note,
        )
        try:
            code = supervise(recipe.work, (replace(config, run_dir=claimed.path),), terms)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f"{error}, {_how_to_go_on(claimed.path)}") from error
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
        path, resume = claim_together(config, place, mesh.world.group, held.append)
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


def claim_together(
    config: RunConfig, place: LaunchEnvironment, group: Group, hold: Callable[[folder.Claimed], object]
) -> tuple[Path, bool]:
    """The run directory, and whether to go on with what is in it, as after a restart. Collective.

    The launcher's store could carry the path over a restart, but others may write to it, and a run that
    believed it would go on from a stranger's checkpoint. So a path is what this rank's own config says, and a
    name that was made up is found again in ``runs/`` by what this start is known by. The first rank is to
    ``hold`` the directory for all.

    Raises:
        ValueError: the ranks were given different directories, or as ``folder.claim``; or a restart cannot
            know its directory.
    """
    require_same_lines(
        group, "run_dir", [str(config.run_dir)], fix=": give all ranks the same --run-dir, or none"
    )
    told = group.all_gather_bytes(place.launch.encode(), "the comparison of launches", limit=LAUNCH_DIGITS)
    restarted = bool(place.restart_count)

    def claim() -> tuple[str, bool]:
        check_world(config, group.size, restarted=restarted)
        if config.run_dir is None and restarted and place.source == "torchrun" and not place.launch:
            raise ValueError("this torchrun does not tell a restart which run was its own: pass --run-dir")
        launches = {launch.decode() for launch in told if launch}
        known = config.run_dir or (folder.of_launch(launches) if restarted else None)
        begun = restarted and known is not None and (known / folder.CONFIG).exists()
        resume = config.resume or begun
        claimed = folder.claim(replace(config, run_dir=known, resume=resume), _say, place.launch)
        hold(claimed)
        require_readable(claimed.path)
        return claimed.path.name, resume

    name, resume = on_first_rank(group, "claiming the run directory", claim)
    return config.run_dir or folder.made_up(name), resume


def _how_to_go_on(path: Path) -> str:
    """What there is in ``path`` of a run that was interrupted, and the flags that go on with it."""
    resume = f"--resume --run-dir {shlex.quote(str(path))}"
    with suppress(OSError):
        steps = [step for step, _ in step_directories(path / folder.CHECKPOINTS)]
        if steps:
            return f"with a checkpoint of step {steps[0]}: {resume} goes on from it"
    return f"before its first checkpoint: {resume} begins again"


class _FaultLog:
    """``faults.jsonl``, made when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path / FAULTS
        self._lines: JsonLines | None = None

    def note(self, event: dict[str, object]) -> None:
        with suppress(OSError, ValueError):  # nothing ends a run for want of the tale of its faults
            self._lines = self._lines or JsonLines(self._path, until_step=0, shape=EVENTS)
            self._lines.write(**event)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
