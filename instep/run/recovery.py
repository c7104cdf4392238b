"""Where a run's state comes from when its ranks meet, and where it is kept meanwhile.

    a rank is killed
      the others raise PeerLost, leave the group, and meet again with a new rank          loop.py
      1. is there a rank that has everything?   the newest gives it to those that are behind
      2. else: the newest snapshot that all of its ranks have written                     elastic/snapshot.py
         or the newest checkpoint that verifies, where that is newer                      checkpoint/load.py
      3. else: the beginning
      each rank takes what it is to hold (``TrainingState.read``, ``put``), and all go on with the next step

Some survivors may have made a step that others have not; it was whole, or they could not have made it. So the
newest state is right, and all ranks take it. Of a divided state no rank has everything once it has left its
group, so there the snapshots are the first to be asked.

Snapshots are written after nearly every step, into memory that the supervisor holds, by every rank that owns
part of the state; checkpoints when they are due, in the background, from a snapshot, whose half is not
overwritten until the write has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from instep.checkpoint import files, image
from instep.checkpoint import save as saving
from instep.checkpoint.background import Saver
from instep.checkpoint.contract import Changes, changes
from instep.checkpoint.image import StateImage, source_of
from instep.checkpoint.load import newest, restore, restore_found
from instep.checkpoint.manifest import Json, Manifest, parse_json
from instep.elastic.heartbeat import Heartbeat
from instep.elastic.rendezvous import ControlChannel
from instep.elastic.snapshot import Snapshot, SnapshotHandle, SnapshotInterval, common_step
from instep.errors import CheckpointRejected, ContractBroken, ReplicasDiffer
from instep.net.agree import all_or_none, on_first_rank
from instep.record.directory import CHECKPOINTS
from instep.run.rank_state import Holds
from instep.state.shards import ELSEWHERE, Shard, elements, without_ties
from instep.state.stored import shards_to_json

if TYPE_CHECKING:
    from instep.run.script_training import ScriptTraining

AGREEMENT = "the agreement on the state"
FRESH, NOTHING = -2, -1
BEGINNING = "the beginning"
SNAPSHOT = "the snapshot"
SHOWN = 12  # differences of two contracts


def restore_newest(
    training: ScriptTraining, snapshots: Snapshots | None, checkpoints: Checkpoints
) -> tuple[str, dict[str, Any]]:
    """All ranks take the newest state that there is: where it came from, and what to tell. Collective.

    Raises:
        CheckpointRejected: there are checkpoints, no snapshots, and none of them can be trusted.
        ContractBroken: the newest checkpoint is of another configuration, and that was not accepted.
        ReplicasDiffer: ranks that have made the same steps hold different bits.
    """
    world = training.mesh.world.group
    steps = _known_steps(training)
    source, told = "a survivor", dict[str, Any]()
    if max(steps) >= 0:
        if any(step != max(steps) for step in steps):
            send(training, steps.index(max(steps)))
    else:

        def look() -> list[int]:
            in_memory = (-1, -1) if snapshots is None else snapshots.newest()
            return [*in_memory, checkpoints.newest()]

        in_memory, number, on_disk = on_first_rank(world, AGREEMENT, look)
        source, told = _take(training, snapshots, checkpoints, (in_memory, number), on_disk)
    training.rank_state.agreed(complete=not training.state.is_divided)
    training.heartbeat.set_step(training.steps_done)
    return source, told


def _take(
    training: ScriptTraining,
    snapshots: Snapshots | None,
    checkpoints: Checkpoints,
    in_memory: tuple[int, int],
    on_disk: int,
) -> tuple[str, dict[str, Any]]:
    """The newer of snapshot and checkpoint, else the beginning. Collective."""
    step, number = in_memory
    if step < 0:
        found = checkpoints.restore(training)
        if found is None:
            training.begin()
            return BEGINNING, {}
        return found
    assert snapshots is not None
    if on_disk > step:
        with suppress(CheckpointRejected):
            found = checkpoints.restore(training)
            if found is not None and training.steps_done > step:
                return found
    snapshots.restore(training, step, number)
    return SNAPSHOT, {}


def _known_steps(training: ScriptTraining) -> list[int]:
    """By rank: a number of steps, or ``NOTHING``, or what all begin with, ``FRESH``. Collective."""
    world, holds = training.mesh.world.group, training.rank_state.holds
    has_all = holds is Holds.EVERYTHING and not training.state.is_divided
    mine = training.steps_done if has_all else FRESH if holds is Holds.INITIAL else NOTHING
    said = json.dumps([mine, training.state_sha256() if has_all else ""]).encode()
    known = [json.loads(data) for data in world.all_gather_bytes(said, AGREEMENT)]
    latest = max(step for step, _ in known)
    held = {rank: its for rank, (step, its) in zip(world.ranks, known, strict=True) if step == latest}
    if len(set(held.values())) > 1:
        raise ReplicasDiffer(
            f"after {latest} steps ranks {', '.join(map(str, held))} hold different states: a bit has "
            "flipped in memory, or an update was computed otherwise; going on from the newest checkpoint",
            ranks=tuple(held),
        )
    return [step for step, _ in known]


def stored(training: ScriptTraining, shards: Sequence[Shard]) -> list[Shard]:
    """Those of ``shards`` that another process needs: each tensor under one of its names."""
    return without_ties(shards, training.state.ties())


def describe(training: ScriptTraining, shards: Sequence[Shard], rows: str = "") -> bytes:
    """All that another process has to know of ``shards`` and of what of the state is no tensor, as JSON.

    ``rows``: what ``rows_of`` has said of them, where it is known.
    """
    return f'{{"rows": {rows or rows_of(shards)}, {json.dumps(body_of(training))[1:]}'.encode()


def body_of(training: ScriptTraining) -> dict[str, Json]:
    """What of the state is no tensor."""
    return {
        "ties": training.state.ties(),
        "options": training.state.options(),
        "run": {**training.rank_state.to_json(), "carried": training.carried()},
    }


def rows_of(shards: Sequence[Shard]) -> str:
    """What ``shards`` are, without their values, as JSON."""
    return json.dumps(shards_to_json(shards))


def take(training: ScriptTraining, images: Sequence[StateImage]) -> None:
    """Give ``training`` the state of ``images``, one of each writer. Collective where it is divided."""
    source, options = source_of(images)
    run = images[0].body["run"]
    with _taken(training, run):
        restore(training.state, source, options, run["step"], None)


@contextmanager
def _taken(training: ScriptTraining, run: Mapping[str, Any]) -> Iterator[None]:
    """The block gives ``training`` the state at which ``run`` was."""
    training.rank_state.restoring()  # until the end of the block, and where it raises, it has nothing
    yield
    training.rank_state.restored(run["step"], run["last"])
    training.carry_on(run["carried"])


def send(training: ScriptTraining, root: int) -> None:
    """All ranks take the state of group rank ``root``, which has everything. Collective."""
    world = training.mesh.world.group
    shards = stored(training, training.state.shards()) if world.rank == root else []
    said = describe(training, shards) if world.rank == root else b""
    sent = image.send(world, root, shards, said, AGREEMENT)
    if world.rank != root:
        take(training, [sent])
    _require_same(training, root, "sent")


def _require_same(training: ScriptTraining, root: int, did: str) -> None:
    """CheckpointRejected on all ranks where one has another state than group rank ``root``. Collective."""
    world = training.mesh.world.group
    hashes = world.all_gather_bytes(training.state_sha256().encode(), AGREEMENT)
    odd = [rank for rank, its in zip(world.ranks, hashes, strict=True) if its != hashes[root]]
    if odd:
        raise CheckpointRejected(
            f"rank {', '.join(map(str, odd))}: the state that rank {world.ranks[root]} {did} does not have "
            "its hash: look for broken memory"
        )
    training.state.settled()  # else the first exchange would take what some ranks were given for an edit


def _opened(snapshot: Snapshot, step: int) -> StateImage:
    """The state after ``step`` in ``snapshot``."""
    half = snapshot.halves[step]
    memory = snapshot.bytes_of(half, 0, snapshot.tensor_bytes)
    body = parse_json(snapshot.description(half) or b"", image.DESCRIPTION_BYTES)
    return StateImage.opened(body, memory)


class InitialState:
    """What one rank has built alone, to take in whatever group it is then.

    Of parameters from the meta device that have no values yet there is nothing to copy: ``put`` leaves those
    that they have been given in the group.
    """

    def __init__(self, training: ScriptTraining) -> None:
        shards = stored(training, training.state.shards())
        built = [x for x in shards if training.state.has_values(x)]
        self._built = StateImage.of(built, body_of(training), "cpu")
        others = (x for x in shards if x.name not in self._built.shards)
        self._unfilled = {x.name: x._replace(tensor=ELSEWHERE) for x in others}

    def put(self, training: ScriptTraining) -> None:
        """Give it to ``training``. Collective where the state is divided."""
        here = {shard.name: shard for shard in training.state.shards()}
        take(training, [self._built, Filled(self._built.body, self._unfilled, here)])


@dataclass(frozen=True)
class Filled(StateImage):
    """Whole ``shards`` of which each rank asks for its own part alone, which is ``here``."""

    here: Mapping[str, Shard]

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``Reader``."""
        there = self.here[name]
        assert there.box is None  # or elements of the whole tensor would be taken for those of the box
        out.copy_(elements(there.tensor, first - there.first, first - there.first + out.numel()))


class Copy:
    """What a rank holds of the state at a moment, to go back to in the same group."""

    def __init__(self, training: ScriptTraining) -> None:
        self._image = StateImage.of(training.state.shards(), body_of(training))

    def put(self, training: ScriptTraining) -> None:
        """Give it to ``training``, once. Collective where the state is divided."""
        options, run = self._image.body["options"], self._image.body["run"]
        holds = training.rank_state.holds
        with _taken(training, run):
            training.state.put(list(self._image.shards.values()), options)
            training.state.resume_at(run["step"], options)
        training.rank_state.holds = holds
        training.state.settled()


class Snapshots:
    """One rank's snapshots, and what it knows of those that a generation before has left.

    A rank copies what it owns of the state, so all snapshots of a step together are the state once: one of
    rank 0 where every rank has everything. When ranks have been lost, those of the next generation, however
    many, each read the ranges that they are to hold from the snapshots of the one before. See
    ``elastic.snapshot`` for why there always is a step that all of a set have.

    Rank 0 decides when one is due, by what the last has cost it: a wish of the step, which tells all ranks at
    no cost.
    """

    def __init__(self, member: ControlChannel) -> None:
        self._member = member
        self._interval = SnapshotInterval()
        self._sets: dict[int, list[SnapshotHandle]] = {}  # by generation
        self._own: Snapshot | None = None
        self._begun: int | None = None  # the generation that began the set of the own one
        self._copied: Sequence[Shard] = ()  # into the last snapshot; released before the next rendezvous
        self._rows = ""
        self._readers: list[tuple[int, int, Saver]] = []  # memory and half that a save beside the steps reads

    def take_over(self, kept: Sequence[SnapshotHandle] | None) -> None:
        """A generation begins, for which the supervisor holds ``kept``."""
        self._own, self._begun, self._interval = None, None, SnapshotInterval()
        self._copied, self._rows = (), ""
        sets: dict[int, list[SnapshotHandle]] = {}
        for one in kept or ():
            sets.setdefault(one.generation, []).append(one)
        self._sets = {number: one for number, one in sets.items() if len(one) == one[0].num_ranks}

    def newest(self) -> tuple[int, int]:
        """The newest step that all snapshots of a set have, and the set; -1 if there is none."""
        found = [(common_step(self._attach(number)), number) for number in self._sets]
        return max(found, default=(-1, -1))

    def restore(self, training: ScriptTraining, step: int, number: int) -> None:
        """Give ``training`` what it is to hold of ``step`` from set ``number``. Collective."""
        world = training.mesh.world.group
        images = all_or_none(world, AGREEMENT, lambda: self.opened(step, number))
        all_or_none(world, AGREEMENT, lambda: take(training, images))
        _require_same(training, 0, "read")
        group = training.state.group
        if len(self._sets[number]) == group.size and training.owns:  # it is written on
            self._own, self._begun = self._attach(number)[group.rank], number
            self._own.return_to(step)

    def opened(self, step: int, number: int) -> list[StateImage]:
        """The state after ``step`` in set ``number``."""
        return [_opened(snapshot, step) for snapshot in self._attach(number)]

    def due(self, training: ScriptTraining) -> bool:
        """Whether this rank wants a snapshot after the step that is under way."""
        return not (training.mesh.rank or self._is_read) and self._interval.due(training.steps_done + 1)

    @property
    def _is_read(self) -> bool:
        """Whether a save still reads the half that would be written next: also one that an earlier generation
        has begun."""
        self._readers = [reader for reader in self._readers if reader[2].is_writing]
        own = self._own
        return own is not None and any(
            (inode, half) == (own.mapping.inode, own.next_half) for inode, half, _ in self._readers
        )

    def after_step(self, training: ScriptTraining, step_s: float) -> None:
        """Copy the state, if it is time to; a step takes ``step_s``."""
        made = training.last
        if made is None or not (made.copy or made.regroup):  # a rank that leaves on purpose loses no step
            return
        if training.owns:
            training.heartbeat.enter("snapshot")
            with self._interval.copying(training.steps_done, step_s):
                self.write(training)

    def write(self, training: ScriptTraining) -> None:
        """Copy what this rank owns of the state."""
        group, own = training.state.group, stored(training, training.state.owned())
        if len(own) != len(self._copied) or any(
            x is not y and x.layout != y.layout for x, y in zip(own, self._copied, strict=True)
        ):
            self._rows = rows_of(own)
        self._copied = own
        description, live = describe(training, own, self._rows), [shard.tensor for shard in own]
        size = image.num_bytes(own)
        self._own = self._own or self._left_by_another(group.size)
        if self._own is not None and self._own.fits(len(description), size) and not self._is_read:
            self._own.write(description, live, training.steps_done)
            return
        room = 2 * len(description), size
        self._own = Snapshot.create(*room) if self._own is None else self._own.grown(*room)
        self._own.write(description, live, training.steps_done)
        self._member.hand_over(self._own, group.rank, group.size, self._begun)

    def copied_for(self, saver: Saver, training: ScriptTraining, shards: Sequence[Shard]) -> list[Shard]:
        """Copies of ``shards``, which this rank owns, for ``saver`` to read: a snapshot of this moment."""
        self.write(training)
        assert self._own is not None
        kept = zip(self._copied, self._own.tensors([x.tensor for x in self._copied]), strict=True)
        copies = {x.name: x._replace(tensor=copy) for x, copy in kept}
        self._readers.append((self._own.mapping.inode, 1 - self._own.next_half, saver))
        return [copies.get(x.name) or x._replace(tensor=x.tensor.clone()) for x in shards]  # a tie is in none

    def _left_by_another(self, num_ranks: int) -> Snapshot | None:
        """The newest snapshot of all of the state, to go on in: the rank that wrote it writes no longer."""
        number = max(self._sets, default=None)
        if number is None or num_ranks > 1 or self._sets[number][0].num_ranks > 1:
            return None
        self._begun = number
        return self._attach(number)[0]

    def _attach(self, number: int) -> list[Snapshot]:
        """The snapshots of a set, by rank."""
        return [
            Snapshot.attach(kept.place) for kept in sorted(self._sets[number], key=lambda kept: kept.rank)
        ]


class Checkpoints:
    """Those in the run directory ``path``, written in the background by every rank that owns part of the
    state.
    """

    def __init__(
        self,
        path: Path,
        timeout_s: float,
        heartbeat: Heartbeat | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.path, self._snapshots = path, snapshots
        told = heartbeat or Heartbeat()
        self._saver = Saver(timeout_s=timeout_s, enter=told.enter, beat=told.beat)

    def save(self, training: ScriptTraining) -> None:
        """Begin to write the state, once what is being written is there. Collective where it is divided."""
        if not training.owns:
            return
        draft = saving.draft(
            step=training.steps_done,
            data_cursor=training.cursor,
            numerical=training.contract,
            world_size=training.mesh.axes.world_size,
            extra={**training.carried(), "models": [*training.registered.models]},
        )
        copy = None
        if self._snapshots is not None:
            copy = partial(self._snapshots.copied_for, self._saver, training)
        its = training.config.checkpoint
        self._saver.save(self.path / CHECKPOINTS, training.state, draft, its.keep, copy, its.frozen)

    def give_up(self) -> None:
        """Ranks have been lost: what waits for one of them waits in vain."""
        self._saver.give_up()

    def watch(self) -> None:
        """Raise what a save has ended with."""
        self._saver.check()

    def close(self) -> None:
        """Wait until what this process has begun is on the disk."""
        self._saver.close()

    def finish(self, training: ScriptTraining) -> None:
        """Wait until what was begun is on the disk. Collective."""
        all_or_none(training.mesh.world.group, "saving a checkpoint", self._saver.close)

    def newest(self) -> int:
        """The step of the newest one, trusted or not; -1 if there is none."""
        steps = files.step_directories(self.path / CHECKPOINTS)
        return steps[0][0] if steps else -1

    def restore(self, training: ScriptTraining) -> tuple[str, dict[str, Any]] | None:
        """Give ``training`` the newest one that verifies: where from, and what to tell; None if none does.

        Collective. Each rank reads what it is to hold; where every rank has everything, rank 0 reads, and
        sends it.

        Raises:
            CheckpointRejected: there are some, and none of them can be trusted.
            ContractBroken: it is of another configuration, and that was not accepted.
        """
        if training.state.is_divided:
            return self._read(training)
        found: tuple[str, dict[str, Any]] | None
        found = on_first_rank(training.mesh.world.group, AGREEMENT, lambda: self._read(training))
        if found is None:
            return None
        if training.mesh.world.size > 1:
            send(training, 0)
        return found[0], found[1]

    def _read(self, training: ScriptTraining) -> tuple[str, dict[str, Any]] | None:
        found = newest(self.path / CHECKPOINTS, training.state.group)
        if found is None:
            return None
        found_changes = require_fit(found.manifest, training, self.path)
        if found.manifest.frozen and training.state.is_divided:
            training.put_built()
        run = {"step": found.manifest.step, "last": None, "carried": found.manifest.extra}
        with _taken(training, run):
            restore_found(found, training.state)
        notes = [f"passed over {reason}" for _, reason in found.rejected]
        notes.append(f"resumed from {found.path}, step {found.manifest.step}")
        notes += [f"note: {line}" for line in _first(found_changes.noted)]
        return str(found.path), {"notes": notes, "accepted": [*found_changes.warned, *found_changes.noted]}


def require_fit(manifest: Manifest, training: ScriptTraining, path: Path) -> Changes:
    """Raise unless going on from this checkpoint gives the bits of one uninterrupted run, and leads on.

    Returns what has changed all the same: what is noted, and what the user has accepted.
    """
    found = changes(manifest.numerical, training.contract, ("in the checkpoint", "now"))
    if found.refused:  # settings first: they change many layers
        lines = sorted(found.refused, key=lambda line: line.startswith("model.layer."))
        raise ContractBroken(
            f"{path} was begun with other settings; restore these in the script or command, or begin "
            f'a new run from its weights: instep.load("{path / CHECKPOINTS}", model=model) in another '
            "--run-dir\n  " + "\n  ".join(_first(lines))
        )
    if found.warned and not training.config.accept_contract:
        raise ContractBroken(
            f"{path} was begun on another machine or with other software, where the bits may differ: restore "
            "these, or pass --accept-contract\n  " + "\n  ".join(_first(found.warned))
        )
    stop, steps = training.config.stop_after, training.config.steps
    if stop and stop <= manifest.step < steps:
        raise ValueError(
            f"stop_after {stop}: the run is at step {manifest.step} of {steps} already: pass a later step, "
            "or 0 to go on to the end"
        )
    return found


def _first(lines: Sequence[str]) -> list[str]:
    """As many as can be read, and how many there are more."""
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
