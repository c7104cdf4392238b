"""The state that one rank has, sent to all ranks of a group.

For a rank that has just joined, and for one whose disk does not have the checkpoint: what it gets is a
``Source`` like any other, of which it reads what it is to hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep.checkpoint.manifest import Json, parse_json
from instep.net.process_group import Group
from instep.state.shards import Shard
from instep.state.stored import ALIGN_BYTES, MemoryReader, places, shards_from_json, views

DESCRIPTION_BYTES = 1 << 24


def send_shards(
    group: Group, root: int, shards: Sequence[Shard], said: bytes, operation: str
) -> tuple[Json, MemoryReader]:
    """What group rank ``root`` has said, and its ``shards`` in memory, on every rank. Collective.

    ``said`` is JSON, an object with the "rows" of the shards and whatever else is to be told; only that of
    ``root`` counts. A broadcast of all shards: S bytes.

    Raises:
        PeerLost: a rank did not come to ``operation``.
    """
    said = group.all_gather_bytes(said, operation, limit=DESCRIPTION_BYTES)[root]
    body = parse_json(said, DESCRIPTION_BYTES)
    begins, nbytes = places(shards_from_json(body["rows"]))
    segment = group.allocate(nbytes, ALIGN_BYTES, torch.device("cpu")).tensor
    if group.rank == root and shards:
        tensors = [shard.tensor for shard in shards]
        torch._foreach_copy_(views(tensors, segment), tensors)
    group.broadcast(segment, operation, root=root)
    return body, MemoryReader(segment, begins)
