"""The state at one moment: shards in memory of their own, and all that is no tensor.

    body      {"rows": [the shards, without values], "ties": ..., "options": ..., and what its maker adds}
    memory    | tensor | tensor | ...      one after the other, each aligned

A snapshot is one, in memory that outlives its rank, and so is what is sent to a rank that joins, what a rank
has built before it joined, and what a replayed step goes back to. A checkpoint is written from one in the
background.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.checkpoint.manifest import Json, parse_json
from instep.checkpoint.state import merged
from instep.net.process_group import Group
from instep.state.shards import Shard, elements, held_shape
from instep.state.stored import ALIGN_BYTES, Source, assemble, offsets, shards_from_json, views

DESCRIPTION_BYTES = 1 << 24


@dataclass(frozen=True)
class StateImage:
    """What one rank has of the state; a ``Reader`` of it."""

    body: Json
    shards: Mapping[str, Shard]

    @staticmethod
    def of(shards: Sequence[Shard], body: Json, device: str | None = None) -> StateImage:
        """A copy of live ``shards`` on ``device``, by default each where it is, and of ``body``."""
        copies = ((x, x.tensor.detach().to(device or x.tensor.device, copy=True)) for x in shards)
        found = {x.name: x._replace(tensor=copy) for x, copy in copies}
        return StateImage(json.loads(json.dumps(body)), found)

    @staticmethod
    def opened(body: Json, memory: Tensor) -> StateImage:
        """What was written to ``memory`` (uint8); ``body`` is from elsewhere."""
        rows = shards_from_json(body["rows"])
        layout = [(x.dtype, held_shape(x.shape, x.first, x.last, x.box)) for x in rows]
        there = zip(rows, views(layout, memory), strict=True)
        return StateImage(body, {x.name: x._replace(tensor=tensor) for x, tensor in there})

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``Reader``."""
        out.copy_(elements(self.shards[name].tensor, first, first + out.numel()))


def num_bytes(shards: Sequence[Shard]) -> int:
    """The bytes of memory that ``shards`` take."""
    return offsets((x.last - x.first) * x.dtype.itemsize for x in shards)[-1]


def copied(shards: Sequence[Shard], memory: Tensor, beat: Callable[[], None] = lambda: None) -> list[Shard]:
    """Copies of ``shards`` in ``memory``, one after the other; ``beat`` is called after each."""
    there = views([(x.dtype, tuple(x.tensor.shape)) for x in shards], memory)
    found = []
    for x, copy in zip(shards, there, strict=True):
        found.append(x._replace(tensor=copy.copy_(x.tensor)))
        beat()
    return found


def source_of(images: Sequence[StateImage]) -> tuple[Source, Json]:
    """The whole state from the ``images`` of all ranks that have a part of it, and its options.

    Raises:
        CheckpointRejected: they are not one whole state.
    """
    by_place = {str(i): image for i, image in enumerate(images)}
    stored = assemble({place: image.shards.values() for place, image in by_place.items()})
    return Source(stored, by_place, images[0].body["ties"]), merged([x.body["options"] for x in images])


def send(group: Group, root: int, shards: Sequence[Shard], description: bytes, operation: str) -> StateImage:
    """The ``shards`` of group rank ``root`` with their ``description``, on every rank. Collective.

    A broadcast of all shards: S bytes. What the other ranks give does not count.

    Raises:
        PeerLost: a rank did not come to ``operation``.
    """
    description = group.all_gather_bytes(description, operation, limit=DESCRIPTION_BYTES)[root]
    body = parse_json(description, DESCRIPTION_BYTES)
    memory = group.allocate(
        num_bytes(shards_from_json(body["rows"])), ALIGN_BYTES, torch.device("cpu")
    ).tensor
    if group.rank == root:
        copied(shards, memory)
    group.broadcast(memory, operation, root=root)
    return StateImage.opened(body, memory)
