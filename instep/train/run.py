"""A run from config to exit code: claim its directory; then start ranks, or be one that was started."""

from __future__ import annotations

import os
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from instep.elastic.faults import parse_all
from instep.elastic.signals import listen
from instep.elastic.supervise import Terms, supervise
from instep.mesh.groups import launcher_store
from instep.mesh.join import init
from instep.mesh.place import Place, detect
from instep.train import folder, loggers
from instep.train.config import Config, check_ranks, check_world, local_ranks, validate
from instep.train.folder import FAULTS, Lines
from instep.train.keep import Checkpoints
from instep.train.part import Part
from instep.train.rows import check_rows, shard_axis
from instep.train.together import on_rank_zero
from instep.train.trainer import Trainer
from instep.train.work import EXIT_CODES, work


def run(config: Config) -> int:
    """Train as ``config`` says, on ranks that are already there or on ranks of this host.

    Returns the exit code: 0 when the last step is done, 75 when the run stopped before and wants to be
    resumed.
    """
    validate(config)
    loggers.check(config.logs.names)
    faults = parse_all(config.fault)
    for fault in faults:
        check_ranks(config, fault.ranks)
    if detect(os.environ).source != "single":
        return run_rank(config)
    threads = config.parallel.strategy == "threads"
    ranks = 1 if threads else local_ranks(config, len(os.sched_getaffinity(0)))
    check_rows(ranks, config.parallel.shard_ranks)
    # The directory is claimed here, so that all ranks are told the same one.
    path = folder.claim(config)
    config = replace(config, run_dir=path)
    try:
        with closing(_FaultLog(path)) as log:
            terms = Terms(
                ranks=ranks,
                min_ranks=config.min_ranks,
                threads=config.parallel.threads,
                timeout_s=config.timeout_s,
                faults=faults,
                say=_say,
                note=log.note,
            )
            return supervise(work, (config,), terms)
    finally:
        folder.release(path)


def run_rank(config: Config) -> int:
    """One rank's part of a run that another launcher has started, which restarts all ranks if one is lost."""
    world_size = detect(os.environ).world_size
    mesh = init(
        shard=shard_axis(world_size, config.parallel.shard_ranks),
        backend=config.parallel.named_backend,
        timeout_s=config.timeout_s,
        threads=config.parallel.threads,
    )
    path: Path | None = None

    def claim() -> tuple[str, bool]:
        place = detect(os.environ)
        check_world(config, mesh.world.group.size, restarted=bool(place.restart_count))
        return _claim_again(config, place)

    try:
        claimed, resume = on_rank_zero(mesh.world.group, "claiming the run directory", claim)
        path = Path(claimed)
        # A fault happens once, and a process that has been restarted cannot know which have.
        fault = () if detect(os.environ).restart_count else config.fault
        trainer = Trainer(replace(config, run_dir=path, resume=resume, fault=fault), mesh)
        asked: list[str] = []
        listen(asked.append)
        trainer.wishes = {"stop": lambda: bool(asked)}
        ending = Part(trainer, path, Checkpoints(path, config.timeout_s)).run()
        trainer.leave()
        return EXIT_CODES[ending]
    finally:
        if path is not None and mesh.rank == 0:
            folder.release(path)
        mesh.close()


def _claim_again(config: Config, place: Place) -> tuple[str, bool]:
    """The run directory, and whether to go on with what is in it, as after a restart by the launcher.

    A directory whose name was made up is known to the launcher's store, which outlives its ranks.
    """
    key, store = "instep/run directory", launcher_store()
    known = config.run_dir
    if known is None and store is not None and store.check([key]):
        known = Path(store.get(key).decode())
    resume = config.resume
    if known is not None and place.restart_count and (known / folder.CONFIG).exists():
        resume = True
    path = folder.claim(replace(config, run_dir=known, resume=resume))
    if store is not None:
        store.set(key, str(path.absolute()))
    return str(path), resume


class _FaultLog:
    """``faults.jsonl``, made when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path / FAULTS
        self._lines: Lines | None = None

    def note(self, event: dict[str, object]) -> None:
        with suppress(OSError):  # a full disk ends no run for want of the tale of its faults
            self._lines = self._lines or Lines(self._path, until_step=0)
            self._lines.write(**event)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
