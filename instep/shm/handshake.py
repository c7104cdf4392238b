"""How the ranks of a group find out whether they share a host, and enter one shared segment if they do.

Names prove nothing: containers share boot ids and host names without sharing memory, and local ranks counted
by a launcher say nothing about a subgroup. So they try: rank 0 creates the segment and publishes in the store
the record of its process; every other rank opens the segment there, reads a random token back and publishes
it with its own record; rank 0 checks the tokens, and that it sees every process by id and start time. As all
records are of one host and one process namespace, then each rank sees every other. Only if all ranks succeed
do all use shared memory; else all use gloo.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from instep.errors import PeerLost, warn
from instep.net.hang_report import FlightRecorder, printable
from instep.net.peers import Peer, is_alive, own_peer
from instep.net.store import StoreClient
from instep.shm import segment
from instep.shm.backend import NAME, ShmGroup
from instep.shm.group_segment import TOKEN_BYTES, GroupSegment
from instep.shm.segment import why_not

if TYPE_CHECKING:
    from torch.distributed import Store

RECORD, VERDICT = "record/{}".format, "verdict"

_warned_reasons: set[str] = set()  # why gloo is used, as already warned


def register() -> None:
    """Register the backend "shm" of torch.distributed, for tensors on the CPU."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def connect(
    store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    """A group of ``size`` ranks that rendezvous in ``store``; ``ranks`` are their global ranks, for errors.

    Raises:
        PeerLost: a rank did not come within ``timeout``.
    """
    ranks = list(ranks or range(size))
    found = rendezvous(store, rank, ranks, timeout)
    if isinstance(found, ShmGroup):
        return found
    if rank == 0 and found not in _warned_reasons:
        _warned_reasons.add(found)
        warn(f"backend shm: ranks {ranks} use gloo instead, because {found}")
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)


def share(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> ShmGroup | None:
    """As ``connect``, but returns None instead of falling back to gloo."""
    found = rendezvous(store, rank, ranks, timeout)
    return found if isinstance(found, ShmGroup) else None


def _create(options: Any, _: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    return connect(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )


def rendezvous(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> ShmGroup | str:
    """The group of ``ranks``, or why they cannot share memory, the same on every rank. Collective.

    Raises:
        PeerLost: a rank did not come.
    """
    store, timeout_s = dist.PrefixStore(NAME, store), timeout.total_seconds()
    flight = FlightRecorder(ranks[rank])
    me = own_peer(ranks[rank])
    if rank:
        _wait(store, [RECORD(0)], ranks[rank], ranks, timeout_s)
    shared, problem, fd = _open(rank, len(ranks), json.loads(store.get(RECORD(0))) if rank else None)
    record: dict[str, Any] = {"peer": me.to_bytes().decode().strip(), "fd": fd, "problem": problem}
    if shared is not None:
        record |= {"token": shared.token.hex(), "core": shared.core.stamp}
    store.set(RECORD(rank), json.dumps(record))
    if rank == 0:
        store.set(VERDICT, json.dumps(_judge(store, shared, ranks, timeout_s)))
    _wait(store, [VERDICT], ranks[rank], ranks, timeout_s)
    verdict = json.loads(store.get(VERDICT))
    if verdict["absent"]:
        raise _absent(verdict["absent"], timeout_s)
    if verdict["problem"] or shared is None:
        return printable(verdict["problem"])
    return ShmGroup(shared, [Peer.from_bytes(peer.encode()) for peer in verdict["table"]], timeout, flight)


def _open(rank: int, size: int, first: dict[str, Any] | None) -> tuple[GroupSegment | None, str, int]:
    """Create the segment, or map that of the ``first`` rank's record; why not; its descriptor."""
    try:
        if why := why_not():
            raise OSError(why)
        if first is None:
            shared, fd = GroupSegment.create(size, secrets.token_bytes(TOKEN_BYTES))
            return shared, "", fd
        if first["problem"]:
            return None, "", -1
        pid = Peer.from_bytes(first["peer"].encode()).pid
        return GroupSegment(segment.attach(pid, int(first["fd"])), rank, size), "", -1
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which differs every time
        cannot = "cannot make shared memory" if first is None else "cannot open the memory of the first rank"
        return None, f"{cannot}: {reason}", -1


def _judge(
    store: Store, shared: GroupSegment | None, ranks: Sequence[int], timeout_s: float
) -> dict[str, Any]:
    """Rank 0 decides: who is absent, why the ranks cannot share memory, or the table of processes."""
    try:
        _wait(store, [RECORD(rank) for rank in range(len(ranks))], ranks[0], ranks, timeout_s)
    except PeerLost as lost:
        return {"absent": lost.ranks, "problem": ""}
    records = [json.loads(store.get(RECORD(rank))) for rank in range(len(ranks))]
    for rank, record in zip(ranks, records, strict=True):
        problem = ""
        if record["problem"]:
            problem = f"rank {rank} {record['problem']}"
        elif shared is not None and record.get("token", "") != shared.token.hex():
            problem = f"rank {rank} opened other memory than that of rank {ranks[0]}"
        elif shared is not None and record["core"] != shared.core.stamp:
            problem = f"rank {rank} has another native core than rank {ranks[0]}: install one version"
        elif is_alive(Peer.from_bytes(record["peer"].encode())) is not True:
            problem = f"rank {ranks[0]} cannot see the process of rank {rank}"
        if problem:
            return {"absent": [], "problem": problem}
    return {"absent": [], "problem": "", "table": [record["peer"] for record in records]}


def _wait(store: Store, keys: Sequence[str], rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Global rank ``rank`` waits for ``keys``; if they do not come, the error names the absent ranks."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        others = [(i, other) for i, other in enumerate(ranks) if i]
        late = []
        with suppress(RuntimeError, TimeoutError):
            late = StoreClient(rank).call(lambda: [r for i, r in others if not store.check([RECORD(i)])])
        if keys == [RECORD(0)] or not late:
            late = [ranks[0]]
        raise _absent(late, timeout_s) from error


def _absent(ranks: Sequence[int], timeout_s: float) -> PeerLost:
    return PeerLost(
        f"rank {', '.join(map(str, ranks))} did not come to the rendezvous of a shared-memory group within "
        f"{timeout_s:g} s: check that it lives, make groups on every rank alike, or raise timeout_s",
        ranks=ranks,
        operation="the rendezvous of a group",
    )
