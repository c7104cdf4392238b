"""Which ranks to reduce over: a mesh, a torch process group, or nothing said."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.events import Recorder
from instep.mesh import device
from instep.mesh.board import Board
from instep.mesh.current import registered
from instep.mesh.group import Group
from instep.mesh.join import default_store
from instep.mesh.mesh import BACKEND_PATIENCE, Mesh

TIMEOUT_S = 300.0


def find_ranks(process_group: Mesh | ProcessGroup | None, timeout_s: float | None) -> tuple[Group, Recorder]:
    """A new group over the ranks that ``process_group`` means, and where to record what they do.

    None means the ``dp`` axis of the registered mesh, else torch's default group, else this process alone.
    Collective over those ranks.
    """
    if process_group is None:
        process_group = registered()
    if isinstance(process_group, Mesh):
        mesh = process_group if process_group.is_view else process_group["dp"]
        return mesh.whole.duplicate(), mesh.recorder
    timeout_s = timeout_s or TIMEOUT_S
    if process_group is None and not dist.is_initialized():
        return Group(None, [0], 0, timeout_s), Recorder(0)
    pg = process_group or dist.group.WORLD
    assert pg is not None
    return _duplicate(pg, timeout_s), Recorder(dist.get_rank())


def _duplicate(pg: ProcessGroup, timeout_s: float) -> Group:
    ranks = dist.get_process_group_ranks(pg)
    if len(ranks) == 1:
        return Group(None, ranks, dist.get_rank(), timeout_s)
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s * BACKEND_PATIENCE),
        backend=device.complete(dist.get_backend(pg)),
        use_local_synchronization=True,
    )
    assert made is not None
    return Group(made, ranks, dist.get_rank(), timeout_s, Board(default_store(), made.group_name))
