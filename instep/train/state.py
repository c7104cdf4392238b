"""The state of a run on its way: to the memory copy, to other ranks, and back from wherever it is newest.

When ranks meet, each brings what it has: a survivor the state after its last step, a newcomer nothing. Some
survivors may have made a step that others have not; it was whole, or they could not have made it. So the
newest state is right, and everybody takes it. Where nobody has one, rank 0 looks in the memory copy, then on
the disk.

That is so where each rank has all of the state. Of a sharded one nobody has: see ``keep.restore_newest``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import copy
from instep.checkpoint.manifest import parse_json
from instep.elastic.memory import Copy
from instep.errors import CheckpointRejected, ReplicasDiffer
from instep.train.together import on_rank_zero
from instep.train.trainer import Made, Trainer

FRESH, NOTHING = -2, -1
DESCRIPTION_BYTES = 1 << 24
AGREEMENT = "the agreement on the state"

Find = Callable[[], tuple[str, dict[str, Any]]]
"""Loads a state into rank 0's trainer: where from, and what to tell (JSON)."""


def capture(trainer: Trainer) -> tuple[bytes, list[Tensor]]:
    """The state: all that is no tensor, as JSON, and the live tensors in the order that it says."""
    description, live = copy.capture(trainer.module, trainer.optimizer, trainer.steps_done)
    state = {
        "state": description,
        "health": trainer.health.state(),
        "last": None if trainer.last is None else asdict(trainer.last),
    }
    return json.dumps(state).encode(), live


def step_in(description: bytes) -> int:
    """The step of what ``description`` is of."""
    return int(parse_json(description, DESCRIPTION_BYTES)["state"]["step"])


def restore(trainer: Trainer, description: bytes, held: list[Tensor]) -> None:
    """Give ``trainer`` the state that ``description`` and ``held`` are of."""
    trainer.fresh = trainer.state_of_run = False  # until all have agreed that this is it
    body = parse_json(description, DESCRIPTION_BYTES)
    trainer.steps_done = copy.restore(trainer.module, trainer.optimizer, body["state"], held)
    trainer.health.restore(body["health"])
    trainer.last = None if body["last"] is None else Made(**body["last"])


def restore_copy(trainer: Trainer, held: Copy) -> None:
    """Give ``trainer`` the state in a memory copy, which has one."""
    description = held.description()
    assert description is not None
    body = parse_json(description, DESCRIPTION_BYTES)
    places = copy.prepare(body["state"], limit_bytes=held.tensor_bytes)
    held.read_into(places)
    restore(trainer, description, places)


def agree(trainer: Trainer, find: Find) -> tuple[str, dict[str, Any]]:
    """All ranks take the newest state that any of them has: where it came from, and what ``find`` told.

    If nobody has one, rank 0 finds it; the beginning is a state, too. Collective.
    """
    world = trainer.mesh.world.group
    steps = _known_steps(trainer)
    newest = max(steps)
    source, told = "a survivor", dict[str, Any]()
    if newest < 0:
        found: list[Any] = on_rank_zero(world, AGREEMENT, lambda: [*find(), trainer.steps_done])
        source, told, newest = found
        from_rank = 0
        behind = newest > 0 or NOTHING in steps
    else:
        from_rank = steps.index(newest)
        behind = any(step != newest for step in steps)
    if behind:
        _send(trainer, from_rank)
    trainer.parallel.keep_own_state()
    trainer.state_of_run = trainer.parallel.holds_state
    trainer.fresh = False
    trainer.pulse.has(trainer.steps_done)
    return source, told


def _known_steps(trainer: Trainer) -> list[int]:
    """What each rank has: a number of steps, or ``NOTHING``, or what all begin with, ``FRESH``. Collective.

    Raises:
        ReplicasDiffer: ranks that have made the same steps hold different bits.
    """
    world, whole = trainer.mesh.world.group, trainer.state_of_run
    mine = trainer.steps_done if whole else FRESH if trainer.fresh else NOTHING
    said = json.dumps([mine, trainer.state_sha256() if whole else ""]).encode()
    known = [json.loads(data) for data in world.all_gather_bytes(said, AGREEMENT)]
    newest = max(step for step, _ in known)
    held = {rank: its for rank, (step, its) in zip(world.ranks, known, strict=True) if step == newest}
    if len(set(held.values())) > 1:
        raise ReplicasDiffer(
            f"after step {newest} ranks {', '.join(map(str, held))} hold different states: a bit has flipped "
            "in memory, or an update was computed otherwise; going on from the newest checkpoint",
            ranks=tuple(held),
        )
    return [step for step, _ in known]


def _send(trainer: Trainer, root: int) -> None:
    """Everybody takes the state of group rank ``root``. Collective."""
    world = trainer.mesh.world.group
    description, live = capture(trainer) if world.rank == root else (b"", [])
    description = world.all_gather_bytes(description, AGREEMENT, limit=DESCRIPTION_BYTES)[root]
    body = parse_json(description, DESCRIPTION_BYTES)
    segment = world.allocate(copy.nbytes(body["state"]), copy.ALIGN_BYTES, torch.device("cpu")).tensor
    places = copy.views(body["state"], segment)
    if world.rank == root:
        torch._foreach_copy_(places, live)
    world.broadcast(segment, AGREEMENT, root=root)
    if world.rank != root:
        restore(trainer, description, places)
    hashes = world.all_gather_bytes(trainer.state_sha256().encode(), AGREEMENT)
    odd = [rank for rank, its in zip(world.ranks, hashes, strict=True) if its != hashes[root]]
    if odd:
        raise CheckpointRejected(
            f"rank {', '.join(map(str, odd))}: the state that rank {world.ranks[root]} sent does not have "
            "its hash: look for broken memory"
        )
