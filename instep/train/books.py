"""What rank 0 writes down while a run goes on: a line per step to plot, and one to compare bit by bit.

Where the state is sharded, all ranks take part in its hashes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.checkpoint import contract
from instep.train.folder import METRICS, Lines, read_last_lines
from instep.train.leaves import Leaves
from instep.train.ledger import LEAVES, LEDGER, SAMPLE_EVERY, STARTED, Ledger, Placement
from instep.train.trainer import WISHES, Made, Trainer

Log = Callable[[int, Mapping[str, float]], None]
"""Told the figures of a step."""


def position(path: Path) -> int:
    """The last step that is in the books of run directory ``path``; -1 for none, 0 for the initial weights.

    Whoever wrote them may have died between one file and the other; then the step counts as not written.
    """
    metrics = [line["step"] for line in read_last_lines(path / METRICS)]
    ledger = [line["step"] for line in read_last_lines(path / LEDGER) if "event" not in line]
    return min(max(metrics, default=-1), max(ledger, default=0))


def starts(path: Path) -> list[dict[str, Any]]:
    """The ledger's lines of the run's beginnings so far."""
    if not (path / LEDGER).exists():
        return []
    with (path / LEDGER).open(encoding="utf-8", errors="replace") as lines:
        found = [line for line in lines if f'"event": "{STARTED}"' in line and line.endswith("\n")]
    return [json.loads(line) for line in found]


def placement(trainer: Trainer) -> Placement:
    """Who does the work from here on."""
    axes, parallel = trainer.mesh.axes, trainer.config.parallel
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return Placement(sizes, parallel.strategy, axes.world_size, asdict(parallel))


class Books:
    """``metrics.jsonl`` and ``ledger.jsonl`` of rank 0; other ranks write nothing.

    Opened when a generation has its state; lines of later steps belong to work that is done again and go.
    """

    def __init__(self, path: Path, trainer: Trainer, written: int, log: Log | None = None) -> None:
        """``written``: the last step that is in them, and that counts. ``log`` is told the figures, too."""
        self.trainer, self.written = trainer, written
        self._log = log or _nobody
        self._files: list[Lines] = []
        self._leaves: Leaves | None = None
        self.keeps = trainer.mesh.rank == 0
        if self.keeps:
            self._metrics = self._open(path / METRICS, written)
        write = self._open(path / LEDGER, written).write if self.keeps else _nothing
        self._ledger = Ledger(write, placement(trainer), every=trainer.config.ledger.every)
        if trainer.config.ledger.leaves:
            leaves = self._open(path / LEAVES, trainer.steps_done) if self.keeps else None
            self._leaves = Leaves(trainer.group, leaves.write if leaves else _nothing)

    def started(self, restarts: int, accepted: list[str]) -> None:
        """The run begins, or goes on, here; ``accepted`` says how its contract has changed.

        Collective where the state is sharded, as is ``step``.
        """
        if not self.trainer.hashes:
            return
        numerical = self.trainer.contract
        if accepted:
            self._ledger.accepted(self.trainer.steps_done, accepted)
        self._ledger.started(
            self.trainer.steps_done,
            restarts=restarts,
            fingerprint=contract.fingerprint(numerical),
            numerical=numerical,
            canary=self.trainer.canary,
            state=self.trainer.state_digests(),
            generation=self.trainer.generation,
        )

    def before_steps(self, held_out: float) -> None:
        """Write down the loss of the initial weights."""
        if self.keeps:
            self._metrics.write(step=0, held_out_loss=held_out)
            self._log(0, {"held_out_loss": held_out})

    def leaves(self, made: Made) -> None:
        """Gather and write down the hashes of the step's leaves, if they were asked for. Collective then."""
        if self._leaves is not None and self.trainer.seen is not None and not made.skipped:
            self._leaves.step(self.trainer.steps_done, self.trainer.seen)

    def step(self, made: Made, held_out: float | None, *, last: bool) -> None:
        """Write down the step that has been made."""
        if not self.trainer.hashes:
            return
        trainer, step = self.trainer, self.trainer.steps_done
        if self.keeps:
            self._figures(made, held_out)
        whole = None
        if self._ledger.is_whole(step, last=last):
            trainer.pulse.enter("hash")
            with trainer.mesh.recorder.span("hash", lane="host"):
                whole = trainer.state_digests()
        self._ledger.step(
            step,
            cursor=trainer.cursor,
            loss=made.loss,
            norm=made.norm,
            sampled=trainer.sampled(SAMPLE_EVERY),
            whole=whole,
            skipped=made.skipped,
        )

    def _figures(self, made: Made, held_out: float | None) -> None:
        """The line to plot."""
        step = self.trainer.steps_done
        figures = {name: x for name, x in asdict(made).items() if name not in ("skipped", *WISHES)}
        extra = {} if held_out is None else {"held_out_loss": held_out}
        self._metrics.write(step=step, **figures, **extra)
        self._log(step, {**figures, **extra})

    def close(self) -> None:
        """Flush to disk."""
        for lines in self._files:
            with suppress(OSError):
                lines.close()

    def _open(self, path: Path, done: int) -> Lines:
        self._files.append(Lines(path, until_step=done))
        return self._files[-1]


def _nobody(step: int, figures: Mapping[str, float]) -> None:
    """Nothing but the files is told."""


def _nothing(**fields: Any) -> None:
    """Other ranks write nothing."""
