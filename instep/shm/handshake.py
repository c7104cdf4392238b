"""How the ranks of a group find out whether they share a host, and meet in one shared segment if they do.

Names prove nothing: containers share boot ids and host names without sharing memory, and local ranks counted
by a launcher say nothing about a subgroup. So it is tried: rank 0 makes the segment and tells through the
store which process holds it; every other rank opens it there and reads a random token back; then each checks
that it sees the process of every other, by process id and start time. Only if all succeed do all use shared
memory; else all use gloo.

The store carries one entry per rank and two of rank 0; the rest happens in the segment.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from instep.errors import PeerLost
from instep.mesh.hang_report import FlightRecorder, printable
from instep.mesh.peers import Peer, is_alive, own_peer
from instep.mesh.store import StoreClient
from instep.shm import segment
from instep.shm.backend import NAME, ShmGroup
from instep.shm.futex import why_not
from instep.shm.group_segment import TOKEN_BYTES, GroupSegment

if TYPE_CHECKING:
    from torch.distributed import Store

SEGMENT, VERDICT = "segment", "verdict"
BLIND = "cannot see the process of rank"
SLICE_S = 0.1  # of a wait in memory, between two looks at the store

_warned_reasons: set[str] = set()  # why gloo is used, as far as a user has been told


def register() -> None:
    """Let torch.distributed know the backend "shm", for tensors on the CPU."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def connect(
    store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    """A group of ``size`` ranks that meet in ``store``; ``ranks`` are their global ranks, for errors.

    Raises:
        PeerLost: a rank did not come within ``timeout``.
    """
    ranks = list(ranks or range(size))
    met = meet(dist.PrefixStore(NAME, store), rank, ranks, timeout.total_seconds())
    if (shared := _group(met, timeout)) is not None:
        return shared
    if rank == 0 and met.reason not in _warned_reasons:
        _warned_reasons.add(met.reason)
        warnings.warn(f"backend shm: ranks {ranks} use gloo instead, because {met.reason}", stacklevel=2)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)


def share(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> ShmGroup | None:
    """As ``connect``, for whom a group without shared memory is of no use: None then, and no warning."""
    return _group(meet(dist.PrefixStore(NAME, store), rank, ranks, timeout.total_seconds()), timeout)


def _group(met: Rendezvous, timeout: timedelta) -> ShmGroup | None:
    return None if met.shared is None else ShmGroup(met.shared, met.table, timeout, met.flight)


def _create(options: Any, _: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    return connect(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )


@dataclass(frozen=True)
class Rendezvous:
    """The outcome, the same on every rank: the group's segment and who shares it, or why there is none.

    ``flight`` is the one that this rank's peers know of.
    """

    shared: GroupSegment | None
    table: tuple[Peer, ...]
    reason: str = ""
    flight: FlightRecorder | None = None


def meet(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Rendezvous:
    """Meet the other ranks; ``ranks[i]`` is the global rank of group rank i. Collective.

    Raises:
        PeerLost: a rank did not come.
    """
    flight = FlightRecorder(ranks[rank])
    me = own_peer(ranks[rank])
    shared, problem = _open(store, rank, ranks, timeout_s)
    told = {"token": shared.token.hex(), "core": shared.core.stamp} if shared else {}
    store.set(_here(rank), json.dumps({**told, "problem": problem}))
    if rank == 0:
        store.set(VERDICT, json.dumps(_judge(store, shared, ranks, timeout_s)))
    _wait(store, [VERDICT], ranks[rank], ranks, timeout_s)
    verdict = json.loads(store.get(VERDICT))
    if verdict["absent"]:
        raise _absent(verdict["absent"], timeout_s)
    if verdict["problem"] or shared is None:
        return Rendezvous(None, (), printable(verdict["problem"]))
    shared.introduce(me)
    _all_ranks(store, shared, 1, ranks, timeout_s)
    table = tuple(shared.peer(other) for other in range(len(ranks)))
    strangers = [peer.rank for peer in table if is_alive(peer) is not True]
    shared.name(f"{BLIND} {strangers[0]}" if strangers else "the rendezvous")
    _all_ranks(store, shared, 2, ranks, timeout_s)
    views = [(ranks[other], shared.label(other)) for other in range(len(ranks))]
    blind = [f"rank {other} {view}" for other, view in views if view.startswith(BLIND)]
    return Rendezvous(None, (), blind[0]) if blind else Rendezvous(shared, table, flight=flight)


def _open(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> tuple[GroupSegment | None, str]:
    """Make the segment or map it, or say why not."""
    if rank != 0:
        _wait(store, [SEGMENT], ranks[rank], ranks, timeout_s)
        where = json.loads(store.get(SEGMENT))
    try:
        if why := why_not():
            raise OSError(why)
        if rank == 0:
            shared, fd = GroupSegment.create(len(ranks), secrets.token_bytes(TOKEN_BYTES))
            store.set(SEGMENT, json.dumps({"pid": own_peer(0).pid, "fd": fd}))
            return shared, ""
        if not where:
            return None, ""  # rank 0 says why
        return GroupSegment(segment.attach(int(where["pid"]), int(where["fd"])), rank, len(ranks)), ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which differs every time
        if rank == 0:
            store.set(SEGMENT, json.dumps({}))
            return None, f"cannot make shared memory: {reason}"
        return None, f"cannot open the memory of rank {ranks[0]}: {reason}"


def _judge(
    store: Store, shared: GroupSegment | None, ranks: Sequence[int], timeout_s: float
) -> dict[str, Any]:
    """Rank 0 reads what all have seen: who did not come, or why they cannot share a segment."""
    try:
        _wait(store, [_here(rank) for rank in range(len(ranks))], ranks[0], ranks, timeout_s)
    except PeerLost as lost:
        return {"absent": lost.ranks, "problem": ""}
    problem = ""
    for rank in reversed(range(len(ranks))):
        told = json.loads(store.get(_here(rank)))
        if told["problem"]:
            problem = f"rank {ranks[rank]} {told['problem']}"
        elif shared is not None and told.get("token", "") != shared.token.hex():
            problem = f"rank {ranks[rank]} opened other memory than that of rank {ranks[0]}"
        elif shared is not None and told["core"] != shared.core.stamp:
            problem = f"rank {ranks[rank]} has another native core than rank {ranks[0]}: install one version"
    return {"absent": [], "problem": problem}


def _wait(store: Store, keys: Sequence[str], rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Global rank ``rank`` waits until ``keys`` are there; else name the ranks that have not been here."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        others = [(i, other) for i, other in enumerate(ranks) if i]
        late = []
        with suppress(RuntimeError, TimeoutError):
            late = StoreClient(rank).call(lambda: [r for i, r in others if not store.check([_here(i)])])
        if keys[0] == SEGMENT or not late:
            late = [ranks[0]]
        raise _absent(late, timeout_s) from error


def _all_ranks(
    store: Store, shared: GroupSegment, count: int, ranks: Sequence[int], timeout_s: float
) -> None:
    """The plainest of rounds, before there is a table of peers.

    So no process is looked at. But the store may know that the group will not come about: it is asked between
    slices of the wait, and then raises.
    """
    shared.words.post(shared.posted[shared.rank], count)
    until = time.monotonic() + timeout_s
    for other in range(shared.size):
        word = shared.posted[other]
        while shared.words[word] < count:  # a signal may end a sleep
            if time.monotonic() > until:
                raise _absent([ranks[other]], timeout_s)
            shared.words.sleep(word, count, min(SLICE_S, until - time.monotonic()))
            if shared.words[word] < count:
                store.check([VERDICT])


def _here(rank: int) -> str:
    return f"here/{rank}"


def _absent(ranks: Sequence[int], timeout_s: float) -> PeerLost:
    return PeerLost(
        f"rank {', '.join(map(str, ranks))} did not come to the rendezvous of a shared-memory group within "
        f"{timeout_s:g} s: look whether it lives, make groups on every rank alike, or raise timeout_s",
        ranks=ranks,
        operation="the rendezvous of a group",
    )
