"""torch.distributed's operations on a given group: ranks that are threads have no default group.

``now=False`` starts an operation and leaves it to the group's own thread; all return the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from instep.mesh.mesh import Mesh
from instep.shm import ShmGroup, connect

PATIENCE_S = 20
SUM = dist.ReduceOp.SUM


def group_of(mesh: Mesh) -> ShmGroup:
    """The group of all ranks, also where the mesh needs none."""
    pg: Any = mesh.world.pg or connect(dist.HashStore(), 0, 1, timedelta(seconds=PATIENCE_S))
    assert isinstance(pg, ShmGroup)
    return pg


def _set(options: Any, now: bool, **fields: Any) -> Any:
    options.asyncOp = not now
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def all_reduce(pg: Any, x: Tensor, op: Any = SUM, *, now: bool = True) -> Any:
    return pg.allreduce([x], _set(dist.AllreduceOptions(), now, reduceOp=op))


def reduce(pg: Any, x: Tensor, root: int, op: Any = SUM, *, now: bool = True) -> Any:
    return pg.reduce([x], _set(dist.ReduceOptions(), now, reduceOp=op, rootRank=root))


def broadcast(pg: Any, x: Tensor, root: int, *, now: bool = True) -> Any:
    return pg.broadcast([x], _set(dist.BroadcastOptions(), now, rootRank=root))


def all_gather(pg: Any, outs: Sequence[Tensor], x: Tensor, *, now: bool = True) -> Any:
    return pg.allgather([list(outs)], [x], _set(AllgatherOptions(), now))


def all_gather_single(pg: Any, out: Tensor, x: Tensor, *, now: bool = True) -> Any:
    return pg._allgather_base(out, x, _set(AllgatherOptions(), now))


def gather(pg: Any, outs: Sequence[Tensor], x: Tensor, root: int, *, now: bool = True) -> Any:
    return pg.gather([list(outs)] if outs else [], [x], _set(dist.GatherOptions(), now, rootRank=root))


def gather_single(pg: Any, out: Tensor, x: Tensor, root: int, *, now: bool = True) -> Any:
    return pg.gather_single(out, x, _set(dist.GatherOptions(), now, rootRank=root))


def scatter(pg: Any, out: Tensor, xs: Sequence[Tensor], root: int, *, now: bool = True) -> Any:
    return pg.scatter([out], [list(xs)] if xs else [], _set(dist.ScatterOptions(), now, rootRank=root))


def reduce_scatter(pg: Any, out: Tensor, xs: Sequence[Tensor], op: Any = SUM, *, now: bool = True) -> Any:
    return pg.reduce_scatter([out], [list(xs)], _set(dist.ReduceScatterOptions(), now, reduceOp=op))


def reduce_scatter_single(pg: Any, out: Tensor, x: Tensor, op: Any = SUM, *, now: bool = True) -> Any:
    return pg._reduce_scatter_base(out, x, _set(dist.ReduceScatterOptions(), now, reduceOp=op))


def all_to_all(pg: Any, outs: Sequence[Tensor], xs: Sequence[Tensor], *, now: bool = True) -> Any:
    return pg.alltoall(list(outs), list(xs), _set(dist.AllToAllOptions(), now))


def all_to_all_single(
    pg: Any,
    out: Tensor,
    x: Tensor,
    out_splits: Sequence[int] = (),
    in_splits: Sequence[int] = (),
    *,
    now: bool = True,
) -> Any:
    options = _set(dist.AllToAllOptions(), now)
    return pg.alltoall_base(out, x, list(out_splits), list(in_splits), options)


def barrier(pg: Any, *, now: bool = True) -> Any:
    return pg.barrier(_set(dist.BarrierOptions(), now))
