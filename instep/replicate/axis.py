"""Which ranks to reduce over: a mesh, a torch process group, or nothing said."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.events import Recorder
from instep.mesh.current import registered
from instep.mesh.join import default_store
from instep.mesh.mesh import BACKEND_PATIENCE, Axis, Mesh

TIMEOUT_S = 300.0


def find_axis(process_group: Mesh | ProcessGroup | None, timeout_s: float | None) -> tuple[Axis, Recorder]:
    """The ranks that ``process_group`` means, and where to record what they do.

    None means the ``dp`` axis of the registered mesh, else torch's default group, else this process alone.
    """
    if process_group is None:
        process_group = registered()
    if isinstance(process_group, Mesh):
        mesh = process_group if process_group.is_view else process_group["dp"]
        return mesh.whole, mesh.recorder
    timeout_s = timeout_s or TIMEOUT_S
    if process_group is None and not dist.is_initialized():
        return Axis("alone", [0], 0, _no_group, timeout_s), Recorder(0)
    group = process_group or dist.group.WORLD
    assert group is not None
    return _axis_of(group, timeout_s), Recorder(dist.get_rank())


def _axis_of(pg: ProcessGroup, timeout_s: float) -> Axis:
    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        if name == "dp":
            return pg
        patience = timedelta(seconds=timeout_s * BACKEND_PATIENCE)
        made = dist.new_group(list(ranks), timeout=patience, use_local_synchronization=True)
        assert made is not None
        return made

    return Axis("dp", dist.get_process_group_ranks(pg), dist.get_rank(), make, timeout_s, default_store())


def _no_group(name: str, ranks: Sequence[int]) -> ProcessGroup:
    raise AssertionError("a world of one needs no group")
