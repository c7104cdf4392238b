"""Which ranks to reduce over: a mesh, a torch process group, or nothing said."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.events import Recorder
from instep.mesh.current import registered
from instep.mesh.mesh import BACKEND_PATIENCE, Axis, Mesh


def find_axis(
    process_group: Mesh | ProcessGroup | None, timeout_s: float | None
) -> tuple[Axis, Recorder, Any]:
    """The ranks that ``process_group`` means, where to record, and the group that was made for us, if any.

    None means the ``dp`` axis of the registered mesh, else torch's default group, else this process alone.
    A bare torch group is duplicated, because the user's own collectives go on using it.
    """
    if process_group is None:
        process_group = registered()
    if isinstance(process_group, Mesh):
        mesh = process_group if process_group.is_view else process_group["dp"]
        return mesh.whole, mesh.recorder, None
    if process_group is None and not dist.is_initialized():
        return Axis("alone", [0], 0, _no_group, timeout_s or 300.0), Recorder(0), None
    group = process_group or dist.group.WORLD
    assert group is not None
    return _duplicate(group, timeout_s or 300.0)


def _duplicate(pg: ProcessGroup, timeout_s: float) -> tuple[Axis, Recorder, Any]:
    made: list[ProcessGroup] = []

    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        if not name.endswith("/instep"):
            return pg
        patience = timedelta(seconds=timeout_s * BACKEND_PATIENCE)
        made.append(dist.new_group(list(ranks), timeout=patience, use_local_synchronization=True))
        return made[-1]

    rank = dist.get_rank()
    axis = Axis("dp", dist.get_process_group_ranks(pg), rank, make, timeout_s)
    return axis, Recorder(rank), made[0] if made else None


def _no_group(name: str, ranks: Sequence[int]) -> ProcessGroup:
    raise AssertionError("a world of one needs no group")
