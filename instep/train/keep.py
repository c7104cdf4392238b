"""Copies of the state: in memory after nearly every step, on the disk when it is due.

Where every rank has the whole state, rank 0 keeps it for all. Where it is sharded each keeps what it has, and
all do so at the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.checkpoint import contract, files, load, whole
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.manifest import Manifest
from instep.checkpoint.owned import Holding
from instep.checkpoint.reload import newest, reload_found
from instep.elastic.member import Member
from instep.elastic.memory import Copy, Interval, Kept, tensor_bytes
from instep.errors import CheckpointRejected, ContractBroken
from instep.shard.optimizer import ShardedOptimizer
from instep.train.copies import Copies, division_of
from instep.train.folder import CHECKPOINTS, CONFIG
from instep.train.state import AGREEMENT, agree, capture, restore_copy, step_in
from instep.train.together import on_every_rank, on_rank_zero
from instep.train.trainer import Trainer


class MemoryCopy:
    """The memory copy as ranks of a generation write it; the supervisor holds it for the next one.

    Rank 0 writes the whole of a replicated state. It decides, too, when a sharded one is copied, by what that
    has cost it: ``due`` is a wish of the step, which tells all ranks at no cost.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._copy: Copy | None = None
        self._interval = Interval()
        self.copies = Copies(member)

    def take_over(self, kept: Sequence[Kept] | None) -> None:
        """A generation begins, for which the supervisor holds ``kept``."""
        self._copy = Copy.attach(kept[-1].place) if kept and kept[-1].num_ranks == 1 else None
        self.copies.take_over(kept or ())
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

    def due(self, trainer: Trainer) -> bool:
        """Whether this rank wants all to copy their parts after the step that is under way."""
        return is_sharded(trainer) and not trainer.mesh.rank and self._interval.due(trainer.steps_done + 1)

    def after_step(self, trainer: Trainer, step_s: float) -> None:
        """Copy the state, if it is time to; a step takes ``step_s``."""
        if is_sharded(trainer):
            made = trainer.last
            if made is not None and (made.copy or made.regroup):  # who parts on purpose loses no step
                trainer.pulse.enter("snapshot")
                with self._interval.copying(trainer.steps_done, step_s):
                    self.copies.write(trainer)
        elif not trainer.mesh.rank and self._interval.due(trainer.steps_done):
            trainer.pulse.enter("snapshot")
            with self._interval.copying(trainer.steps_done, step_s):
                self._write_whole(trainer)

    def _write_whole(self, trainer: Trainer) -> None:
        description, live = capture(trainer)
        if self._copy is not None and self._copy.fits(description, live):
            self._copy.write(description, live)
            return
        self._copy = Copy.create(2 * len(description), tensor_bytes(live))
        self._copy.write(description, live)
        self._member.hand_over(self._copy)


class Checkpoints:
    """Those in the run directory ``path``, written in the background by rank 0, or by all where sharded."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._saver = Saver(timeout_s=timeout_s)

    def save(self, trainer: Trainer) -> None:
        """Begin to write the state, once what is being written is there. Collective where it is sharded."""
        if (division := division_of(trainer)) is not None:
            self._save_sharded(trainer, division)
            return
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

    def _save_sharded(self, trainer: Trainer, division: Holding) -> None:
        draft = saving.draft(
            step=trainer.steps_done,
            data_cursor=trainer.cursor,
            state_sha256=saving.NOT_YET,
            numerical=trainer.contract,
            world_size=trainer.mesh.axes.world_size,
            extra={"health": trainer.health.state()},
        )
        keep = trainer.config.checkpoint.keep
        path = self.path / CHECKPOINTS
        self._saver.save_sharded(path, draft, trainer.module, trainer.optimizer, division, keep)

    def give_up(self) -> None:
        """Ranks have been lost: what waits for one of them waits in vain."""
        self._saver.give_up()

    def watch(self) -> None:
        """Raise what a save has ended with."""
        self._saver.check()

    def close(self) -> None:
        """Wait until what this process has begun is on the disk."""
        self._saver.close()

    def finish(self, trainer: Trainer) -> None:
        """Wait until what was begun is on the disk. Collective."""
        wait = on_every_rank if is_sharded(trainer) else on_rank_zero
        wait(trainer.mesh.world.group, "saving a checkpoint", self._saver.close)

    def newest(self) -> int:
        """The step of the newest one, trusted or not; -1 if there is none."""
        steps = files.step_directories(self.path / CHECKPOINTS)
        return steps[0][0] if steps else -1

    def restore(self, trainer: Trainer) -> tuple[str, dict[str, Any]]:
        """Give ``trainer`` the newest one that verifies, else the beginning: where from, and what to tell.

        Collective where the state is sharded.

        Raises:
            CheckpointRejected: there are some, and none of them can be trusted.
            ContractBroken: it is of another configuration, and that was not accepted.
        """
        division = division_of(trainer)
        path = self.path / CHECKPOINTS
        found = load.newest(path) if division is None else newest(path, division.group)
        if found is None:
            trainer.begin()
            return "the beginning", {}
        accepted = require_fit(found.manifest, trainer, self.path)
        trainer.fresh = trainer.state_of_run = False
        if division is None:
            whole.restore(found, trainer.module, trainer.optimizer)
        else:
            reload_found(found, trainer.module, trainer.optimizer, division)
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


def restore_newest(
    trainer: Trainer, memory: MemoryCopy | None, checkpoints: Checkpoints
) -> tuple[str, dict[str, Any]]:
    """All ranks take the newest state that there is: where it came from, and what to tell. Collective.

    Of a sharded state no survivor has all. So what counts is the newest step of which every part is in the
    memory copies, then the checkpoints; weights that are newer go back with the rest.
    """
    checkpoints.give_up()
    if not is_sharded(trainer):
        return agree(trainer, lambda: find(trainer, memory, checkpoints))
    world = trainer.mesh.world.group

    def look() -> list[int]:
        in_memory = (-1, -1) if memory is None else memory.copies.newest()
        return [*in_memory, checkpoints.newest()]

    step, number, on_disk = on_rank_zero(world, AGREEMENT, look)
    trainer.fresh = trainer.state_of_run = trainer.parts_of_run = False
    found = None
    if step < 0:
        found = checkpoints.restore(trainer)
    elif on_disk > step:
        with suppress(CheckpointRejected):
            found = checkpoints.restore(trainer)
    if memory is not None and step >= 0 and (found is None or trainer.steps_done < step):
        memory.copies.restore(trainer, step, number)
        found = "the memory copies", {}
    assert found is not None
    trainer.state_of_run, trainer.parts_of_run, trainer.fresh = trainer.parallel.holds_state, True, False
    trainer.pulse.has(trainer.steps_done)
    return found


def is_sharded(trainer: Trainer) -> bool:
    """Whether each rank has a part of the state only."""
    return isinstance(trainer.optimizer, ShardedOptimizer)


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
