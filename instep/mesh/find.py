"""Which ranks a wrapper works over: a mesh, a torch process group, or nothing said."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.errors import PeerLost
from instep.events import Recorder
from instep.mesh.board import Board
from instep.mesh.current import registered
from instep.mesh.group import Group
from instep.mesh.groups import default_store, from_store
from instep.mesh.join import unjoined
from instep.mesh.mesh import Mesh

TIMEOUT_S = 300.0
WRAPPING = "wrapping a model"


def find_ranks(
    process_group: Mesh | ProcessGroup | None, timeout_s: float | None = None, *, what: str = WRAPPING
) -> tuple[Group, Recorder]:
    """A new group over the ranks that ``process_group`` means, and where to record what they do.

    A mesh means its ``dp`` axis, and ``shard`` with it if there is one. None means the registered mesh, else
    torch's default group, else this process alone.
    Collective over those ranks; ``what`` they do says an error.

    Raises:
        PeerLost: not all of them came.
        ValueError: this process was started as one of many, but has joined no group.
    """
    try:
        return _find(process_group, timeout_s)
    except (dist.DistError, PeerLost) as error:
        raise PeerLost(
            f"{what} makes a group of its ranks, and one of them never came: do it on every rank, as often "
            f"and in the same order. The store said: {error}",
            ranks=getattr(error, "ranks", ()),
            operation="the making of a group",
        ) from error


def _find(process_group: Mesh | ProcessGroup | None, timeout_s: float | None) -> tuple[Group, Recorder]:
    if process_group is None:
        process_group = registered()
    if isinstance(process_group, Mesh):
        axis = process_group.whole if process_group.is_view else process_group.data
        return axis.duplicate(), process_group.recorder
    timeout_s = timeout_s or TIMEOUT_S
    if process_group is None and (place := unjoined()) is not None:
        raise ValueError(
            f"this process is rank {place.rank} of {place.world_size} ({place.source}), but joined no "
            "group: call instep.init() first, or every rank would train a model of its own"
        )
    if process_group is None and not dist.is_initialized():
        return Group(None, [0], 0, timeout_s), Recorder(0)
    pg = process_group or dist.group.WORLD
    assert pg is not None
    return _duplicate(pg, timeout_s), Recorder(dist.get_rank())


def _duplicate(pg: ProcessGroup, timeout_s: float) -> Group:
    ranks, rank = dist.get_process_group_ranks(pg), dist.get_rank()
    if len(ranks) == 1:
        return Group(None, ranks, rank, timeout_s)
    store = default_store()
    made = from_store(store, rank, timeout_s, pg)("duplicate", ranks)
    return Group(made, ranks, rank, timeout_s, Board(store, f"duplicate/{'-'.join(map(str, ranks))}", rank))
