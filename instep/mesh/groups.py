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


def backend_timeout(timeout_s: float) -> timedelta:
    """The limit of a backend: later than ours, which names the rank, but not by much.

    A process cannot end while gloo still waits.
    """
    return timedelta(seconds=1.1 * timeout_s + 2)


def default_store() -> Store:
    """The store that torch's default group met in."""
    return dist.distributed_c10d._get_default_store()


def from_store(store: Store, rank: int, timeout_s: float, like: ProcessGroup | None = None) -> MakeGroup:
    """Make groups that only their maker knows, over ``store``; they end when they are dropped.

    They have the backends of ``like``, by default torch's default group, and one for CPU tensors. Collective
    over their ranks, each of which makes as many groups of a name as the others.
    """
    config = str(dist.get_backend_config(like)) if dist.is_initialized() else "cpu:gloo"

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        key = f"instep/groups/{name}/{members}"
        # The store outlives groups and meshes: never the same keys twice.
        own = dist.PrefixStore(f"{key}/{store.add(f'{key}/rank {rank}', 1)}", store)
        return device.make_group(own, ranks.index(rank), ranks, backend_timeout(timeout_s), config)

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


def destroy(pg: ProcessGroup) -> None:
    """Destroy a group that torch.distributed knows; one that it does not know ends when it is dropped."""
    if dist.is_initialized() and pg in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(pg)
