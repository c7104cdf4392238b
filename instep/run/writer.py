"""What the ranks add to the record of a run: its lines in ``steps.jsonl``, and the heads of its traces.

Rank 0 writes the lines. Of a sharded state all ranks hash, and the hashes of micro-batches are gathered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from instep.launch.launch_environment import detect
from instep.net.device import default_backend
from instep.net.process_group import Group
from instep.record import step_lines
from instep.record.directory import RECORD
from instep.record.jsonl import Fields, JsonLines, read_lines
from instep.record.step_lines import SAMPLE_EVERY, Made
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.script_training import ScriptTraining
from instep.state.homes import shape_of
from instep.timeline.run_setting import RunSetting

Log = Callable[[int, Mapping[str, float]], None]
"""Given the figures of a step."""


def require_readable(path: Path) -> None:
    """Read what a run that continues in ``path`` will read, before any of its ranks is started.

    Raises:
        OSError: a file cannot be read, or is none.
        ValueError: a line is not one of a run.
    """
    step_lines.starts(path)
    read_lines(path / RECORD, shape=step_lines.LINES)


def layout(training: ScriptTraining) -> Fields:
    """How the ranks share the work from here on, for the line of a start."""
    axes = training.mesh.axes
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    values = axes.world_size, sizes, training.config.parallel.strategy, training.parallel
    return dict(zip(step_lines.LAYOUT, values, strict=True))


class RunWriter:
    """``steps.jsonl`` of a run, written by rank 0; the other ranks of a group take part in its hashes.

    Opened when a generation has its state: lines of later steps are removed, since these are made again.
    """

    def __init__(self, path: Path, training: ScriptTraining, written: int, log: Log | None = None) -> None:
        """``written``: how many steps the file has lines of that count, -1: none, and no initial evaluation.
        ``log`` is given the figures, too."""
        self.training, self.written = training, written
        self._log = log
        self._lines: JsonLines | None = None
        if training.mesh.rank == 0:
            self._lines = JsonLines(path / RECORD, before_step=max(written, 0))

    def started(self, restarts: int, accepted: list[str]) -> None:
        """The run begins, or continues, here; ``accepted`` says how its contract has changed.

        Collective where the state is sharded.
        """
        training = self.training
        if not training.owns:
            return
        if accepted:
            self._write(step_lines.accepted(training.steps_done, accepted))
        self._write(
            step_lines.started(
                training.steps_done,
                layout(training),
                restarts=restarts,
                fingerprint=training.fingerprint,
                numerical=training.contract,
                state=training.state_digests(),
                generation=training.generation,
            )
        )

    def evaluated(self, held_out_loss: float) -> None:
        """The initial weights have this loss."""
        self._write(step_lines.evaluated(held_out_loss))
        self._tell(0, {"held_out_loss": held_out_loss})

    def step(self, made: Made, held_out_loss: float | None, *, last: bool) -> None:
        """Write the line of the last step. Collective where the state is sharded, or leaves are hashed."""
        training, config = self.training, self.training.config.record
        done = training.steps_done
        more: Fields = {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        figures = {**made.figures, **more}
        if config.leaves and training.seen is not None and not made.skipped:
            more |= gather_leaves(training.group, training.seen)
        if not training.owns:
            return
        whole = None
        if last or (config.hash_every > 0 and done % config.hash_every == 0):
            with training.mesh.recorder.span("hash", lane="host"):
                whole = training.state_digests()
            training.heartbeat.enter("ledger")
        sampled = training.sampled(SAMPLE_EVERY)
        self._write(
            step_lines.step_line(done - 1, made, cursor=training.cursor, sampled=sampled, whole=whole, **more)
        )
        self._tell(done - 1, figures)

    def close(self) -> None:
        """Flush to disk."""
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()

    def _write(self, line: Fields) -> None:
        if self._lines is not None:
            self._lines.write(**line)

    def _tell(self, step: int, figures: Mapping[str, float]) -> None:
        if self._log is not None and self._lines is not None:
            self._log(step, figures)


def gather_leaves(group: Group, seen: GradientHashes) -> Fields:
    """The hashes of all ranks' micro-batches, in their order, and those of the sum. Collective."""
    mine = {"leaves": list(seen.leaves.items()), "reduced": seen.reduced}
    everyone = group.all_gather_bytes(
        json.dumps(mine).encode(), "the exchange of the hashes of micro-batches"
    )
    found = {rank: json.loads(data) for rank, data in zip(group.ranks, everyone, strict=True)}
    leaves = [
        {"leaf": leaf, "rank": rank, "parameters": digests}
        for rank, its in found.items()
        for leaf, digests in its["leaves"]
    ]
    reduced: Fields = {}
    for rank in sorted(found, reverse=True):  # where several ranks have a sum, the first one's
        reduced |= found[rank]["reduced"]
    return {"leaves": sorted(leaves, key=lambda line: line["leaf"]), "reduced": reduced}


def trace_head(training: ScriptTraining) -> Fields:
    """What advice has to know of a run, for the head of a rank's file in ``trace/``."""
    config, mesh = training.config, training.mesh
    place = detect(os.environ)
    size = mesh.axes.world_size
    local = size if place.source == "single" else place.local_world_size
    peers = mesh.world.group.peers
    # Two containers of a host have no network in common, but its cores.
    neighbours = sum(peer.host == peers.me.host for peer in peers.table)
    backend = config.parallel.named_backend or default_backend(mesh.device, one_host=local == size)
    setting = RunSetting(
        strategy="fully_shard" if config.parallel.shard_stage >= 2 else config.parallel.strategy,
        backend=backend,
        device=mesh.device.type,
        world_size=size,
        ranks_per_host=max(local, neighbours),
        hosts=-(-size // local),
        threads=config.parallel.threads,
        cores=len(os.sched_getaffinity(0)),
        bucket_mb=config.parallel.bucket_mb,
        num_leaves=config.batch.num_micro_batches,
        micro_size=config.batch.micro_size,
        pp=mesh.axes.size("pp"),
        model_ranks=mesh.model.size,
        schedule=config.parallel.schedule,
        cuts=config.parallel.cuts,
        num_workers=max((loader.num_workers for loader in training.registered.loaders.values()), default=0),
    )
    num_parameters = sum(shape_of(p).numel() for p in training.module.parameters())
    head = {"setting": asdict(setting), "optimizer": config.optim.name, "num_parameters": num_parameters}
    return {**head, "script": True} if training.command == "instep run" else head
