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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from instep.errors import PeerLost
from instep.mesh.flight import Flight
from instep.mesh.peers import Peer, lives, myself
from instep.shm import segment
from instep.shm.futex import available
from instep.shm.room import TOKEN_BYTES, Room

if TYPE_CHECKING:
    from torch.distributed import Store

ROOM, VERDICT = "room", "verdict"
BLIND = "cannot see the process of rank"


@dataclass(frozen=True)
class Met:
    """The outcome, the same on every rank: a room and who is in it, or why there is none.

    ``flight`` is the one that this rank's peers know of.
    """

    room: Room | None
    table: tuple[Peer, ...]
    reason: str = ""
    flight: Flight | None = None


def meet(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Met:
    """Meet the other ranks; ``ranks[i]`` is the global rank of group rank i. Collective.

    Raises:
        PeerLost: a rank did not come.
    """
    flight = Flight(ranks[rank])
    me = myself(ranks[rank], flight)
    room, problem = _open(store, rank, ranks, timeout_s)
    store.set(_here(rank), json.dumps({"token": room.token.hex() if room else "", "problem": problem}))
    if rank == 0:
        store.set(VERDICT, json.dumps(_judge(store, room, ranks, timeout_s)))
    _wait(store, [VERDICT], ranks, timeout_s)
    verdict = json.loads(store.get(VERDICT))
    if verdict["absent"]:
        raise _absent(verdict["absent"], timeout_s)
    if verdict["problem"] or room is None:
        return Met(None, (), verdict["problem"])
    room.introduce(me)
    _everybody(room, 1, ranks, timeout_s)
    table = tuple(room.peer(other) for other in range(len(ranks)))
    strangers = [peer.rank for peer in table if lives(peer) is not True]
    room.name(f"{BLIND} {strangers[0]}" if strangers else "the meeting")
    _everybody(room, 2, ranks, timeout_s)
    views = [(ranks[other], room.label(other)) for other in range(len(ranks))]
    blind = [f"rank {other} {view}" for other, view in views if view.startswith(BLIND)]
    return Met(None, (), blind[0]) if blind else Met(room, table, flight=flight)


def _open(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> tuple[Room | None, str]:
    """Make the room or enter it, or say why not."""
    if rank != 0:
        _wait(store, [ROOM], ranks, timeout_s)
        where = json.loads(store.get(ROOM))
    try:
        if not available():
            raise OSError("it needs Linux on x86-64")
        if rank == 0:
            room, fd = Room.create(len(ranks), secrets.token_bytes(TOKEN_BYTES))
            store.set(ROOM, json.dumps({"pid": myself(0).pid, "fd": fd}))
            return room, ""
        if not where:
            return None, ""  # rank 0 says why
        return Room(segment.attach(int(where["pid"]), int(where["fd"])), rank, len(ranks)), ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which differs every time
        if rank == 0:
            store.set(ROOM, json.dumps({}))
            return None, f"cannot make shared memory: {reason}"
        return None, f"cannot open the memory of rank {ranks[0]}: {reason}"


def _judge(store: Store, room: Room | None, ranks: Sequence[int], timeout_s: float) -> dict[str, Any]:
    """Rank 0 reads what all have seen: who did not come, or why they cannot be in one room."""
    try:
        _wait(store, [_here(rank) for rank in range(len(ranks))], ranks, timeout_s)
    except PeerLost as lost:
        return {"absent": lost.ranks, "problem": ""}
    problem = ""
    for rank in reversed(range(len(ranks))):
        told = json.loads(store.get(_here(rank)))
        if told["problem"]:
            problem = f"rank {ranks[rank]} {told['problem']}"
        elif room is not None and told["token"] != room.token.hex():
            problem = f"rank {ranks[rank]} opened other memory than that of rank {ranks[0]}"
    return {"absent": [], "problem": problem}


def _wait(store: Store, keys: Sequence[str], ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until ``keys`` are there; else name the ranks that have not been here."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        late = [other for i, other in enumerate(ranks) if i and not store.check([_here(i)])]
        if keys[0] == ROOM or not late:
            late = [ranks[0]]
        raise _absent(late, timeout_s) from error


def _everybody(room: Room, count: int, ranks: Sequence[int], timeout_s: float) -> None:
    """The plainest of rounds, before there is a table of peers."""
    room.words.post(room.posted(room.rank), count)
    until = time.monotonic() + timeout_s
    for other in range(room.size):
        word = room.posted(other)
        while room.words[word] < count:  # a signal may end a sleep
            if time.monotonic() > until:
                raise _absent([ranks[other]], timeout_s)
            room.words.sleep(word, count, until - time.monotonic())


def _here(rank: int) -> str:
    return f"here/{rank}"


def _absent(ranks: Sequence[int], timeout_s: float) -> PeerLost:
    return PeerLost(
        f"rank {', '.join(map(str, ranks))} did not come to the meeting of a shared-memory group within "
        f"{timeout_s:g} s",
        ranks=ranks,
        operation="the meeting of a group",
    )
