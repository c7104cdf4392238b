"""What the ranks of a sharded state write together: agreed upon in one message, before anything is written.

Each rank says what it has and all put the same plan together, so a hole or an overlap is an error on every
rank now, and not on whoever loads the files later. The hash of the whole needs no rank that has the whole:
each hashes its own blocks, which no piece ever cuts, and the digests are put in a row.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from instep.checkpoint import files, pieces, state
from instep.checkpoint.manifest import Json, parse_json
from instep.checkpoint.moments import split
from instep.checkpoint.owned import Holding, Owned, merged, owned, ties_of
from instep.checkpoint.pieces import MODEL, OPTIMIZER, Entries, Row
from instep.errors import CheckpointRejected, PeerLost
from instep.mesh.exits import as_told
from instep.mesh.group import Group
from instep.ordered.hash import DIGEST_BYTES, Described, block_digests, persistent_buffers, whole_sha256
from instep.ordered.parts import Part

MESSAGE_BYTES = 1 << 26
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The same on every rank, but for ``rank`` and its ``parts``."""

    rank: int
    by_rank: tuple[tuple[Row, ...], ...]
    parts: tuple[Part, ...]
    rest: Json
    order: tuple[str, ...]  # of the entries, in the hash
    ties: dict[str, str]
    token: str  # drawn by the first rank
    exists: bool  # whether the first rank sees a checkpoint of that step already

    @property
    def num_ranks(self) -> int:
        return len(self.by_rank)

    @property
    def entries(self) -> Entries:
        """Where each entry will be, by the names of files."""
        return pieces.assemble(
            {
                file_of(kind, rank, self.num_ranks): [row for row in rows if row[0].startswith(kind)]
                for rank, rows in enumerate(self.by_rank)
                for kind in (MODEL, OPTIMIZER)
            }
        )


def file_of(kind: str, rank: int, num_ranks: int) -> str:
    """``model-00001-of-00004.safetensors``."""
    return f"{kind.removesuffix(':')}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def plan(module: nn.Module, optimizer: Optimizer | None, division: Holding, path: Path) -> Plan:
    """Compare what the ranks have, which is to become ``path``. Collective.

    Raises:
        CheckpointRejected: what they have is not one whole state, or one of them raised.
        OSError: on the first rank, which cannot write there.
    """
    group, token = division.group, secrets.token_hex(8)

    def mine() -> tuple[Owned, bytes]:
        exists = group.rank == 0 and _prepare(path)
        own = owned(module, optimizer, division)
        rows = pieces.rows_to_json(map(pieces.row, own.parts))
        return own, json.dumps({"rows": rows, "rest": own.rest, "token": token, "exists": exists}).encode()

    (own, _), everyone = together(group, "the plan of a checkpoint", mine, lambda made: made[1])
    bodies = [parse_json(data, MESSAGE_BYTES) for data in everyone]
    rests = [body["rest"] for body in bodies]
    by_rank = tuple(tuple(pieces.rows_from_json(body["rows"])) for body in bodies)
    names = [row[0] for rows in by_rank for row in rows]
    made = Plan(
        rank=group.rank,
        by_rank=by_rank,
        parts=tuple(own.parts),
        rest=merged(rests),
        order=hash_order(module, names),
        ties=ties_of(module),
        token=bodies[0]["token"],
        exists=bodies[0]["exists"],
    )
    _ = made.entries  # or it raises, on every rank alike
    return made


def _prepare(path: Path) -> bool:
    """Whether ``path`` is there already; if not, it can be made: found out while all ranks listen."""
    files.make_directory(path.parent)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    return os.path.lexists(path)


def together(
    group: Group, operation: str, function: Callable[[], T], said: Callable[[T], bytes]
) -> tuple[T, list[bytes]]:
    """What ``function`` returns, and what every rank has ``said`` of it. Collective.

    Its error is raised on the rank it is from, and as a ``CheckpointRejected`` on all others.
    """
    try:
        result = function()
        data, problem = b"\x01" + said(result), None
    except Exception as error:
        data, problem = b"\x00" + str(error)[:2000].encode(), error
    try:
        everyone = group.all_gather_bytes(data, operation, limit=MESSAGE_BYTES)
    except PeerLost as lost:
        if problem is None:
            raise
        raise problem from lost
    if problem is not None:
        raise problem
    for rank, its in zip(group.ranks, everyone, strict=True):
        if its[:1] != b"\x01":
            raise as_told(CheckpointRejected(f"rank {rank}: {its[1:].decode(errors='replace')}"))
    return result, [its[1:] for its in everyone]


def hash_order(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """The entries that the hash of the state is over, in its order, of moments those among ``names``."""
    inner = state.unwrapped(module)
    parameters = [name for name, _ in inner.named_parameters()]
    keys: dict[str, set[str]] = {}
    for full in names:
        if full.startswith(OPTIMIZER):
            key, name = split(full.removeprefix(OPTIMIZER))
            keys.setdefault(name, set()).add(key)
    own = [MODEL + name for name in (*parameters, *(name for name, _ in persistent_buffers(inner)))]
    moments = [f"{OPTIMIZER}{key}/{name}" for name in parameters for key in sorted(keys.get(name, ()))]
    return (*own, *moments)


def digests(parts: Iterable[Part]) -> bytes:
    """Those of all blocks of ``parts``, in a row."""
    return b"".join(digest for part in parts for digest in block_digests(part.tensor))


def state_hash(
    order: Sequence[str], by_rank: Sequence[Sequence[Row]], everyone: Sequence[bytes], step: int
) -> str:
    """The hash of the whole state from the ``digests`` of each rank's rows."""
    hashed = set(order)
    found: dict[str, list[tuple[int, bytes]]] = {}
    layouts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rows, data in zip(by_rank, everyone, strict=True):
        at = 0
        for name, shape, dtype, first, last in rows:
            if name not in hashed:
                continue
            end = at + DIGEST_BYTES * pieces.num_blocks(last - first)
            found.setdefault(name, []).append((first, data[at:end]))
            layouts[name] = str(dtype), shape
            at = end
        if at != len(data):
            raise CheckpointRejected(
                f"expected {at} bytes of digests, got {len(data)}: take another checkpoint"
            )

    def described() -> Iterable[Described]:
        for name in order:
            in_order = sorted(found[name], key=lambda each: each[0])
            yield name.partition(":")[2], *layouts[name], b"".join(data for _, data in in_order)

    return whole_sha256(described(), step)
