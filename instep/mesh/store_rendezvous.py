"""A rendezvous in a store, with a deadline: ranks wait for each other to make a process group.

Backends call the store in native code while they are constructed, which nothing ends before its own time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from instep.errors import PeerLost
from instep.mesh import device
from instep.mesh.hang_report import words_of
from instep.mesh.store_client import PATIENCE_S, StoreClient

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
MAKING = "the making of a group"


def backend_timeout(timeout_s: float) -> timedelta:
    """The deadline of a backend: a little later than ours, which names the rank.

    A process cannot end while gloo still waits.
    """
    return timedelta(seconds=1.1 * timeout_s + 2)


def rendezvous(
    store: Store, name: str, ranks: Sequence[int], rank: int, timeout_s: float, make: Callable[[Store], T]
) -> T:
    """``make(store)``, in which all ``ranks`` wait for each other, under keys that no group has used.

    A ``TCPStore`` on a dead host, or behind a cut network, blocks its caller until TCP gives up, after a
    quarter of an hour, so ``make`` runs in a thread that is abandoned at the deadline. Each rank first counts
    its rendezvous in the store, which tells afterwards who came. Collective over ``ranks``, of which each
    makes as many of a ``name``.

    Raises:
        PeerLost: not all came, or they do not reach the store or each other.
    """
    members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    key = f"instep/groups/{name}/{members}"
    number = 0

    def count_and_make() -> T:
        nonlocal number
        number = store.add(f"{key}/rank {rank}", 1)
        return make(dist.PrefixStore(f"{key}/{number}", store))

    began = time.monotonic()
    limit_s = backend_timeout(timeout_s).total_seconds() + PATIENCE_S  # the backend's own error comes first
    try:
        return StoreClient(rank).call(device.as_here(count_and_make), limit_s)
    except PeerLost as error:
        raise error.with_traceback(None) from None  # it says all, and the frames are of the thread
    except (RuntimeError, TimeoutError) as error:
        # Whether it may be due to other ranks, or to the way to them; gloo has no type of its own for those.
        if not (isinstance(error, dist.DistError | TimeoutError) or "connectFullMesh" in str(error)):
            raise
        late, why = _late(store, {other: f"{key}/rank {other}" for other in ranks}, number, rank, timeout_s)
        raise PeerLost(
            f"rank {rank} waited {time.monotonic() - began:.1f} s in the making of group {name!r} of ranks "
            f"{', '.join(map(str, ranks))}, {why}. Cause: {words_of(error)}",
            ranks=late,
            operation=MAKING,
        ) from None


def _late(
    store: Store, counts: dict[int, str], number: int, rank: int, timeout_s: float
) -> tuple[list[int], str]:
    """The ranks that have not come to rendezvous ``number``, and what to do; 0: this rank did not either."""
    try:
        if not number:
            raise TimeoutError
        late = StoreClient(rank).call(lambda: [i for i, key in counts.items() if store.add(key, 0) < number])
    except (RuntimeError, TimeoutError):
        return [], (
            "and the store gives no answer: rank 0 or its host has ended, or the network to it is cut: look "
            "there, then start again"
        )
    if late:
        return late, (
            f"and never came: rank {', '.join(map(str, late))}. Look whether it lives and its host can be "
            f"reached, make groups on every rank alike, or raise timeout_s ({timeout_s:g} s)"
        )
    return [], (
        "to which all came, but not all reach each other: look at the network between their hosts, a "
        "firewall, GLOO_SOCKET_IFNAME"
    )
