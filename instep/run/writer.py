"""What a run writes while it goes on: a line per step to plot, one to compare, and the head of its trace.

    metrics.jsonl   the figures of each step                  rank 0
    ledger.jsonl    its bits                                  rank 0; of a sharded state all ranks hash
    leaves.jsonl    hashes of each micro-batch's gradient     rank 0, gathered from all ranks
    trace/          when it did what                          every rank, see ``timeline.trace_files``

What trains is known here by ``ScriptTraining`` alone: no model, no data, no loss of any kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.checkpoint.manifest import fingerprint
from instep.launch.launch_environment import detect
from instep.net.device import default_backend
from instep.net.process_group import Group
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.folder import METRICS
from instep.run.jsonl import Fields, JsonLines, marked_lines, read_last_lines, read_lines
from instep.run.ledger import (
    ACCEPTED,
    LEAVES,
    LEDGER,
    LINES,
    SAMPLE_EVERY,
    STARTED,
    STARTS,
    LedgerWriter,
    Placement,
    StateDigests,
    Write,
)
from instep.run.rank_state import Made
from instep.run.script_training import ScriptTraining
from instep.run.shape import COUNT, NUMBER, Shape
from instep.state.homes import shape_of
from instep.timeline.run_setting import RunSetting

METRIC_LINES = Shape({"step": COUNT}, required={"step"}, others=NUMBER)

Log = Callable[[int, Mapping[str, float]], None]
"""Told the figures of a step."""


def position(path: Path) -> int:
    """The last step that run directory ``path`` has a line of; -1 for none, 0 for the initial weights.

    Its writer may have died between one file and the other; then the step counts as not written.
    """
    metrics = [line["step"] for line in read_last_lines(path / METRICS, METRIC_LINES)]
    ledger = [line["step"] for line in read_last_lines(path / LEDGER, LINES) if "event" not in line]
    return min(max(metrics, default=-1), max(ledger, default=0))


def require_readable(path: Path) -> None:
    """Read what a run that goes on in ``path`` will read, before any of its ranks is started.

    Raises:
        OSError: a file of it cannot be read, or is none.
        ValueError: a line is not what a run writes.
    """
    starts(path)
    position(path)
    read_lines(path / METRICS, shape=METRIC_LINES)  # all are summed up at the end


def starts(path: Path) -> list[Fields]:
    """The ledger's lines of the run's beginnings so far."""
    return marked_lines(path / LEDGER, f'"event": "{STARTED}"'.encode(), STARTS)


def is_of_another_contract(path: Path, step: int) -> bool:
    """Whether the run has gone on from its checkpoint of ``step`` under a new contract."""
    lines = marked_lines(path / LEDGER, f'"event": "{ACCEPTED}"'.encode(), LINES)
    return any(line["step"] == step for line in lines)


def placement(training: ScriptTraining) -> Placement:
    """Who does the work from here on."""
    axes = training.mesh.axes
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return Placement(sizes, training.config.parallel.strategy, axes.world_size, training.parallel)


class RunWriter:
    """``metrics.jsonl``, ``ledger.jsonl`` and ``leaves.jsonl`` of rank 0; other ranks write nothing.

    Opened when a generation has its state; lines of later steps belong to work that is done again and go.
    """

    def __init__(self, path: Path, training: ScriptTraining, written: int, log: Log | None = None) -> None:
        """``written``: the last step in the files that counts. ``log`` is told the figures, too."""
        self.training, self.written = training, written
        self._log = log or _log_nowhere
        self._files: list[JsonLines] = []
        self._leaves: MicroBatchHashes | None = None
        self.keeps = training.mesh.rank == 0
        if self.keeps:
            self._metrics = self._open(path / METRICS, written)
        write = self._open(path / LEDGER, written).write if self.keeps else _write_nothing
        self._ledger = LedgerWriter(write, placement(training), every=training.config.record.hash_every)
        if training.config.record.leaves:
            leaves = self._open(path / LEAVES, training.steps_done) if self.keeps else None
            self._leaves = MicroBatchHashes(training.group, leaves.write if leaves else _write_nothing)

    def started(self, restarts: int, accepted: list[str]) -> None:
        """The run begins, or goes on, here; ``accepted`` says how its contract has changed.

        Collective where the state is sharded, as is ``step``.
        """
        training = self.training
        if not training.owns:
            return
        numerical = training.contract
        if accepted:
            self._ledger.accepted(training.steps_done, accepted)
        self._ledger.started(
            training.steps_done,
            restarts=restarts,
            fingerprint=fingerprint(numerical),
            numerical=numerical,
            canary=training.canary,
            state=training.state_digests(),
            generation=training.generation,
        )

    def before_steps(self, held_out: float | None) -> None:
        """Write down that the run begins, with the loss of the initial weights where it is known."""
        if self.keeps:
            figures = {} if held_out is None else {"held_out_loss": held_out}
            self._metrics.write(step=0, **figures)
            self._log(0, figures)

    def leaves(self, made: Made) -> None:
        """Gather and write down the hashes of the step's micro-batches, if asked for. Collective then."""
        if self._leaves is not None and self.training.seen is not None and not made.skipped:
            self._leaves.step(self.training.steps_done, self.training.seen)

    def step(self, made: Made, held_out: float | None, *, last: bool) -> None:
        """Write down the step that has been made."""
        if not self.training.owns:
            return
        training, step = self.training, self.training.steps_done
        if self.keeps:
            self._figures(made, held_out)
        whole: StateDigests | None = None
        if self._ledger.is_whole(step, last=last):
            with training.mesh.recorder.span("hash", lane="host"):
                whole = training.state_digests()
            training.heartbeat.enter("ledger")
        self._ledger.step(
            step,
            cursor=training.cursor,
            loss=made.loss,
            norm=made.norm,
            sampled=training.sampled(SAMPLE_EVERY),
            whole=whole,
            skipped=made.skipped,
        )

    def _figures(self, made: Made, held_out: float | None) -> None:
        """The line to plot."""
        step = self.training.steps_done
        figures = {name: x for name, x in asdict(made).items() if not isinstance(x, bool | str | dict)}
        figures |= made.logged
        extra = {} if held_out is None else {"held_out_loss": held_out}
        self._metrics.write(step=step, **figures, **extra)
        self._log(step, {**figures, **extra})

    def close(self) -> None:
        """Flush to disk."""
        for lines in self._files:
            with suppress(OSError):
                lines.close()

    def _open(self, path: Path, done: int) -> JsonLines:
        self._files.append(JsonLines(path, until_step=done))
        return self._files[-1]


class MicroBatchHashes:
    """Gathers the hashes of all ranks of ``group``; its first rank writes them down with ``write``."""

    def __init__(self, group: Group, write: Write) -> None:
        self.group = group
        self._write = write

    def step(self, step: int, seen: GradientHashes) -> None:
        """The gradient of step number ``step`` (steps done with it) is there. Collective."""
        first = self.group.rank == 0
        mine = {"leaves": list(seen.leaves.items()), "reduced": seen.reduced}
        everyone = self.group.all_gather_bytes(
            json.dumps(mine).encode(), "the exchange of the hashes of micro-batches"
        )
        if first:
            for line in _hash_lines(step, dict(zip(self.group.ranks, everyone, strict=True))):
                self._write(**line)


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
        schedule=config.parallel.schedule,
        cuts=config.parallel.cuts,
    )
    num_parameters = sum(shape_of(p).numel() for p in training.module.parameters())
    head = {"setting": asdict(setting), "optimizer": config.optim.name, "num_parameters": num_parameters}
    return {**head, "script": True} if training.command == "instep run" else head


def _hash_lines(step: int, said: Mapping[int, bytes]) -> Iterator[Fields]:
    """The micro-batches in their order, a line for each rank that computed parameters' gradients of it; then
    the sum."""
    found = {rank: json.loads(data) for rank, data in said.items()}
    leaves: Sequence[tuple[int, int, Fields]] = [
        (leaf, rank, digests) for rank, its in found.items() for leaf, digests in its["leaves"]
    ]
    for leaf, rank, digests in sorted(leaves, key=lambda each: each[0]):
        yield {"step": step, "leaf": leaf, "rank": rank, "parameters": digests}
    reduced: Fields = {}
    for rank in sorted(found, reverse=True):  # of what several ranks have, the first one's
        reduced |= found[rank]["reduced"]
    yield {"step": step, "reduced": reduced}


def _log_nowhere(step: int, figures: Mapping[str, float]) -> None:
    """The files alone are told."""


def _write_nothing(**fields: Any) -> None:
    """Other ranks write nothing."""
