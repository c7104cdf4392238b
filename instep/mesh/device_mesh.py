"""torch's ``DeviceMesh`` in the place of a mesh: which dim of it shares out the batch, a rank's place in it.

init_device_mesh("cpu", (4,))                                          its one dim
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))           "dp", as it is called
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]     the same, said by the program
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# What those dims are called in torch's own examples and here, along which ranks have other samples.
BATCH_DIMS = ("dp", "ddp", "data", "replicate", "shard", "dp_replicate", "dp_shard", "fsdp")


def batch_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of this rank and those with which it shares out the batch.

    Raises:
        ValueError: no dim of several is one of ``BATCH_DIMS``, or more than one is; or this rank has no place
            in the mesh.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {_written(mesh)}, ranks {mesh.mesh.tolist()}")
    if mesh.ndim == 1:
        return mesh.get_group()
    found = [name for name in mesh.mesh_dim_names or () if name in BATCH_DIMS]
    if len(found) == 1:
        return mesh.get_group(found[0])
    if found:
        raise ValueError(
            f"{_written(mesh)}: {' and '.join(found)} would share out the batch together, and no group has "
            f"the ranks of both: pass mesh[{', '.join(map(repr, found))}]._flatten('dp'), or a mesh of "
            "instep.init(dp=..., shard=...)"
        )
    raise ValueError(
        f"{_written(mesh)}: expected one dim, or one that is called {', '.join(BATCH_DIMS[:-1])} or "
        f"{BATCH_DIMS[-1]}: pass mesh[name] of the dim along which the batch is shared out"
    )


def require_used(mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` where ``mesh`` has ranks along a dim that does not share out the batch: each of
    them would train a model of its own."""
    names = mesh.mesh_dim_names or ()
    unused = [
        name
        for name, size in zip(names, mesh.shape, strict=False)
        if size > 1 and mesh.ndim > 1 and name not in BATCH_DIMS
    ]
    if unused:
        raise ValueError(
            f"{_written(mesh)}: the batch is shared out along one dim alone, and nothing would use "
            f"{' and '.join(unused)}, whose ranks would each train a model of their own. Register mesh[name] "
            "of that dim, or, if they have different parts of the model, pass process_group=mesh"
        )


def place_in(mesh: DeviceMesh, what: str) -> Any:
    """What ``instep.get(what)`` answers for ``mesh``: of its one dim, or of all its ranks.

    Raises:
        ValueError: there is no answer: no group has all ranks of a mesh of several dims, or the launcher has
            not told the rank on this host.
    """
    ranks = mesh.mesh.flatten().tolist()
    match what:
        case "grank":
            return dist.get_rank()
        case "rank":
            return ranks.index(dist.get_rank())
        case "ws":
            return len(ranks)
        case "pg":
            return _group_of_all(mesh, ranks)
        case "device":
            return _device(mesh.device_type)
    try:
        return dist.get_node_local_rank()
    except RuntimeError as error:
        raise ValueError("get('lrank'): LOCAL_RANK is not set: call instep.init(), which knows it") from error


def _group_of_all(mesh: DeviceMesh, ranks: list[int]) -> ProcessGroup | None:
    if mesh.ndim == 1:
        return mesh.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    raise ValueError(
        f"get('pg'): no group has all ranks of {_written(mesh)}: pass mesh=mesh[name] of one dim"
    )


def _device(kind: str) -> torch.device:
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def _written(mesh: DeviceMesh) -> str:
    """ "DeviceMesh of dp(2) * tp(2)"."""
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    return (
        f"DeviceMesh of {' * '.join(f'{name}({size})' for name, size in zip(names, mesh.shape, strict=True))}"
    )
