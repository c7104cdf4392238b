"""From the word "shm" to a group: of shared memory where the ranks share a host, of gloo elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from instep.shm.group import NAME, ShmGroup
from instep.shm.meeting import meet

if TYPE_CHECKING:
    from torch.distributed import Store

_said: set[str] = set()  # reasons that a user has been told


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
    if met.room is not None:
        return ShmGroup(met.room, met.table, timeout, met.flight)
    if rank == 0 and met.reason not in _said:
        _said.add(met.reason)
        warnings.warn(f"backend shm: ranks {ranks} use gloo instead, because {met.reason}", stacklevel=2)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)


def _create(options: Any, _: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    return connect(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )
