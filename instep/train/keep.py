"""Copies of the state: in memory after nearly every step, on the disk when it is due."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.checkpoint import contract, files, load, whole
from instep.checkpoint.background import Saver
from instep.checkpoint.manifest import Manifest
from instep.elastic.member import Member
from instep.elastic.memory import Copy, Interval, Place, tensor_bytes
from instep.errors import CheckpointRejected, ContractBroken
from instep.train.folder import CHECKPOINTS, CONFIG
from instep.train.state import capture, restore_copy, step_in
from instep.train.together import on_rank_zero
from instep.train.trainer import Trainer


class MemoryCopy:
    """The memory copy as rank 0 of a generation writes it; the supervisor holds it for the next one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._copy: Copy | None = None
        self._interval = Interval()

    def take_over(self, place: Place | None) -> None:
        """A generation begins, whose memory copy is at ``place``."""
        self._copy = None if place is None else Copy.attach(place)
        self._interval = Interval()

    @property
    def step(self) -> int:
        """The step of what is in it; -1 if nothing is."""
        description = self._copy.description() if self._copy is not None else None
        return -1 if description is None else step_in(description)

    def restore(self, trainer: Trainer) -> None:
        """Give ``trainer`` what is in it."""
        assert self._copy is not None
        restore_copy(trainer, self._copy)

    def after_step(self, trainer: Trainer, step_s: float) -> None:
        """Copy the state, if it is time to; a step takes ``step_s``."""
        if trainer.mesh.rank or not self._interval.due(trainer.steps_done):
            return
        trainer.pulse.enter("snapshot")
        with self._interval.copying(trainer.steps_done, step_s):
            description, live = capture(trainer)
            if self._copy is not None and self._copy.fits(description, live):
                self._copy.write(description, live)
                return
            self._copy = Copy.create(2 * len(description), tensor_bytes(live))
            self._copy.write(description, live)
            self._member.hand_over(self._copy)


class Checkpoints:
    """Those in the run directory ``path``, written by rank 0 in the background."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._saver = Saver(timeout_s=timeout_s)

    def save(self, trainer: Trainer) -> None:
        """Begin to write the state, once what is being written is there."""
        if trainer.mesh.rank:
            return
        module, optimizer = trainer.module, trainer.optimizer
        state = whole.collect(module, optimizer)
        self._saver.save(
            self.path / CHECKPOINTS,
            step=trainer.steps_done,
            model=state.model,
            optimizer=state.optimizer,
            data_cursor=trainer.cursor,
            state_sha256=whole.hash_later(module, trainer.steps_done),
            numerical=trainer.contract,
            world_size=trainer.mesh.axes.world_size,
            extra={"optimizer": state.rest, "health": trainer.health.state()},
            keep=trainer.config.checkpoint.keep,
        )

    def watch(self) -> None:
        """Raise what a save has ended with."""
        self._saver.check()

    def close(self) -> None:
        """Wait until what this process has begun is on the disk."""
        self._saver.close()

    def finish(self, trainer: Trainer) -> None:
        """Wait until what was begun is on the disk. Collective."""
        on_rank_zero(trainer.mesh.world.group, "saving a checkpoint", self._saver.close)

    def newest(self) -> int:
        """The step of the newest one, trusted or not; -1 if there is none."""
        steps = files.step_directories(self.path / CHECKPOINTS)
        return steps[0][0] if steps else -1

    def restore(self, trainer: Trainer) -> tuple[str, dict[str, Any]]:
        """Give ``trainer`` the newest one that verifies, else the beginning: where from, and what to tell.

        Raises:
            CheckpointRejected: there are some, and none of them can be trusted.
            ContractBroken: it is of another configuration, and that was not accepted.
        """
        found = load.newest(self.path / CHECKPOINTS)
        if found is None:
            trainer.begin()
            return "the beginning", {}
        accepted = require_fit(found.manifest, trainer, self.path)
        trainer.fresh = trainer.state_of_run = False
        whole.restore(found, trainer.module, trainer.optimizer)
        trainer.health.restore(found.manifest.extra["health"])
        trainer.steps_done, trainer.last = found.manifest.step, None
        notes = [f"passed over {reason}" for _, reason in found.rejected]
        notes.append(f"resumed from {found.path}, step {found.manifest.step}")
        return str(found.path), {"notes": notes, "accepted": accepted}


def find(trainer: Trainer, memory: MemoryCopy | None, checkpoints: Checkpoints) -> tuple[str, dict[str, Any]]:
    """Give ``trainer`` the newest state that is kept anywhere: where it was, and what to tell."""
    step = -1 if memory is None else memory.step
    if memory is None or step < 0:
        return checkpoints.restore(trainer)
    if checkpoints.newest() > step:
        with suppress(CheckpointRejected):
            found = checkpoints.restore(trainer)
            if trainer.steps_done > step:
                return found
    memory.restore(trainer)
    return "the memory copy", {}


def require_fit(manifest: Manifest, trainer: Trainer, path: Path) -> list[str]:
    """Raise unless going on from this checkpoint gives the bits of one uninterrupted run, and leads on.

    Returns what has changed, where the user has accepted a new contract.
    """
    changed = contract.differences(manifest.numerical, trainer.contract)
    if changed and not trainer.config.accept_contract:
        raise ContractBroken(
            f"{path} was begun with other settings, and going on with these would not give the bits of one "
            f"uninterrupted run: use its own (they are in {path / CONFIG}), start a new run in another "
            "--run-dir, or pass --accept-contract\n  " + "\n  ".join(changed)
        )
    stop, steps = trainer.config.stop_after, trainer.config.steps
    if stop and stop <= manifest.step < steps:
        raise ValueError(
            f"stop_after {stop}: the run is at step {manifest.step} of {steps} already: pass a later step, "
            "or 0 to go on to the end"
        )
    return changed
