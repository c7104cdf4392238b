"""Making process groups: one per axis that a user may use with torch.distributed, and many of our own.

Backends pair operations by the order of their issue alone, so a collective that a user starts between two of
ours on the same group would exchange numbers with it, and so would two wrappers in one backward. Every user
inside instep therefore has a group of its own. These are made straight from the store: torch's registry names
a group after the number of groups that a process has, which may differ between ranks, and gives a destroyed
group's name, with its old addresses in the store, to the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from instep.mesh import device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

MakeGroup = Callable[[str, Sequence[int]], "ProcessGroup"]

# Lost groups, with the operations that they still owe. gloo's destructor waits for these, and its abort
# leaves them pending for ever; they end when the peers' connections do, or at the backend's own deadline.
_lost: list[tuple[ProcessGroup, Sequence[device.Waitable]]] = []


def backend_timeout(timeout_s: float) -> timedelta:
    """The limit of a backend: later than ours, which names the rank, but not by much.

    A process cannot end while gloo still waits.
    """
    return timedelta(seconds=1.1 * timeout_s + 2)


def default_store() -> Store:
    """The store that torch's default group met in."""
    return dist.distributed_c10d._get_default_store()


def launcher_store() -> Store | None:
    """The store beneath the prefixes of this start: what it holds, a restart by the same launcher finds."""
    if not dist.is_initialized():
        return None
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def from_store(
    store: Store,
    rank: int,
    timeout_s: float,
    like: ProcessGroup | None = None,
    *,
    config: str | None = None,
) -> MakeGroup:
    """Make groups that only their maker knows, over ``store``; they end when they are dropped.

    They have the backends of ``config`` (as of ``device.complete``), else those of ``like``, by default
    torch's default group, and one for CPU tensors. Collective over their ranks, each of which makes as many
    groups of a name as the others.
    """
    if config is None:
        config = str(dist.get_backend_config(like)) if dist.is_initialized() else "cpu:gloo"
    backends = config

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        _sweep()
        members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        key = f"instep/groups/{name}/{members}"
        # The store outlives groups and meshes: never the same keys twice.
        own = dist.PrefixStore(f"{key}/{store.add(f'{key}/rank {rank}', 1)}", store)
        return device.make_group(own, ranks.index(rank), ranks, backend_timeout(timeout_s), backends)

    return make


def registered(partitions: dict[str, Iterable[Sequence[int]]], rank: int, timeout_s: float) -> MakeGroup:
    """Make groups that torch.distributed knows; ``partitions[name]`` are all the groups of an axis.

    Collective over the whole world, because torch's registry counts the groups of others too.
    """

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        mine = None
        for members in partitions[name]:
            pg = dist.new_group(
                list(members), timeout=backend_timeout(timeout_s), group_desc=f"instep {name}"
            )
            mine = pg if rank in members else mine
        assert mine is not None
        return mine

    return make


def drop(pg: ProcessGroup, pending: Sequence[device.Waitable] = ()) -> None:
    """Let a group of ``from_store`` go without waiting for ``pending``, which nobody waits for any more."""
    _lost.append((pg, pending))
    _sweep()


def _sweep() -> None:
    """Forget the lost groups that owe nothing any more."""
    _lost[:] = [(pg, pending) for pg, pending in _lost if not all(work.is_completed() for work in pending)]


def destroy(pg: ProcessGroup) -> None:
    """Destroy a group that torch.distributed knows; one that it does not know ends when it is dropped."""
    if dist.is_initialized() and pg in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(pg)
