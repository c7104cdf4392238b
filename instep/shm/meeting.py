"""How the ranks of a group find out whether they share a host, and meet in one room if they do.

Names prove nothing: containers share boot ids and host names without sharing memory, and local ranks counted
by a launcher say nothing about a subgroup. So it is tried: rank 0 makes the room and tells through the store
which process holds it; every other rank opens it there and reads a random token back; then each looks every
other in the eye, by process id and start time. Only if all succeed is the room taken, by all.

The store carries one entry per rank and two of rank 0; the rest happens in the room.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from instep.errors import PeerLost
from instep.mesh.peers import Peer, lives, myself
from instep.shm import segment
from instep.shm.futex import available
from instep.shm.room import TOKEN_BYTES, Room
from instep.shm.segment import Mapping

if TYPE_CHECKING:
    from torch.distributed import Store

ROOM, VERDICT = "room", "verdict"


@dataclass(frozen=True)
class Met:
    """The outcome, the same on every rank: a room and who is in it, or why there is none."""

    room: Room | None
    table: tuple[Peer, ...]
    reason: str = ""


def meet(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Met:
    """Meet the other ranks; ``ranks[i]`` is the global rank of group rank i. Collective.

    Raises:
        PeerLost: a rank did not come.
    """
    me = myself(ranks[rank])
    room, problem, mapping = _open(store, rank, ranks, timeout_s)
    store.set(f"here/{rank}", json.dumps({"token": room.token.hex() if room else "", "problem": problem}))
    if rank == 0:
        store.set(VERDICT, _judge(store, room, ranks, timeout_s))
    _wait(store, [VERDICT], ranks, timeout_s)
    reason = store.get(VERDICT).decode()
    if reason or room is None:
        return Met(None, (), reason or "no room")
    room.introduce(me)
    table = [me] * len(ranks)
    _everybody(room, 1, ranks, timeout_s)
    for other in range(len(ranks)):
        table[other] = room.peer(other)
    strangers = [peer.rank for peer in table if lives(peer) is not True]
    room.name("the meeting" if not strangers else f"cannot see the process of rank {strangers[0]}")
    _everybody(room, 2, ranks, timeout_s)
    views = [room.label(other) for other in range(len(ranks))]
    blind = [f"rank {ranks[other]} {view}" for other, view in enumerate(views) if view.startswith("cannot")]
    del mapping  # everybody has the room now
    return Met(None, (), blind[0]) if blind else Met(room, tuple(table))


def _open(
    store: Store, rank: int, ranks: Sequence[int], timeout_s: float
) -> tuple[Room | None, str, Mapping | None]:
    """Make the room or enter it; the mapping keeps it open for those who come later."""
    if rank == 0:
        if not available():
            store.set(ROOM, json.dumps({"problem": "needs Linux on x86-64"}))
            return None, "needs Linux on x86-64", None
        room, mapping = Room.create(len(ranks), secrets.token_bytes(TOKEN_BYTES))
        store.set(ROOM, json.dumps({"pid": myself(0).pid, "fd": mapping.fd}))
        return room, "", mapping
    _wait(store, [ROOM], ranks, timeout_s)
    where = json.loads(store.get(ROOM))
    if not available() or "problem" in where:
        return None, where.get("problem", "needs Linux on x86-64"), None
    try:
        mapping = segment.attach(int(where["pid"]), int(where["fd"]))
        return Room(mapping, rank, len(ranks)), "", mapping
    except (OSError, ValueError) as error:
        return None, f"cannot open the memory of rank {ranks[0]}: {error.__class__.__name__}", None


def _judge(store: Store, room: Room | None, ranks: Sequence[int], timeout_s: float) -> str:
    """Rank 0 reads what all have seen; empty if all are in the same room."""
    _wait(store, [f"here/{rank}" for rank in range(len(ranks))], ranks, timeout_s)
    for rank in range(len(ranks)):
        told = json.loads(store.get(f"here/{rank}"))
        if told["problem"]:
            return f"rank {ranks[rank]} {told['problem']}"
        if room is not None and told["token"] != room.token.hex():
            return f"rank {ranks[rank]} opened other memory than that of rank {ranks[0]}"
    return ""


def _wait(store: Store, keys: Sequence[str], ranks: Sequence[int], timeout_s: float) -> None:
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        late = [ranks[i] for i, key in enumerate(keys) if len(keys) > 1 and not store.check([key])]
        raise _absent(late or [ranks[0]], timeout_s) from error


def _everybody(room: Room, count: int, ranks: Sequence[int], timeout_s: float) -> None:
    """The plainest of rounds, before there is a table of peers."""
    room.words.post(room.posted(room.rank), count)
    for other in range(room.size):
        room.words.sleep(room.posted(other), count, timeout_s)
        if room.words[room.posted(other)] < count:
            raise _absent([ranks[other]], timeout_s)


def _absent(ranks: Sequence[int], timeout_s: float) -> PeerLost:
    names = ", ".join(map(str, ranks))
    return PeerLost(
        f"rank {names} did not come to the meeting of a shared-memory group within {timeout_s:g} s",
        ranks=ranks,
        operation="the meeting of a group",
    )
