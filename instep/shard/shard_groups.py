"""Which ranks have what of a sharded module: a shard group has it once, a replicate group has the same shard.

    mesh of dp(2) * shard(3)       shard 0   shard 1   shard 2
                     replica 0:    rank 0    rank 1    rank 2     a shard group: one host, gathers within it
                     replica 1:    rank 3    rank 4    rank 5     another shard group
                                      a replicate group: the same shard, on several hosts

Weights and each micro-batch's gradients travel within a shard group, where memory or the network is fast;
only the sum of a shard goes from one to the other, once per step. Without a ``shard`` axis there is one shard
group, which is all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from instep.events import Recorder
from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh, mesh_for_replicas, registered_mesh
from instep.net.process_group import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ShardRanks:
    """New groups over them. ``weights`` has the ranks of ``shard_group`` again, for another thread.

    ``replicate_group`` is None where there is one shard group.
    """

    whole: Group
    shard_group: Group
    weights: Group
    replicate_group: Group | None

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicate_group is None else self.replicate_group.size

    @property
    def replica(self) -> int:
        """Number of this rank's shard group."""
        return 0 if self.replicate_group is None else self.replicate_group.rank

    @property
    def groups(self) -> list[Group]:
        """All of them, each once."""
        found = [self.weights, self.shard_group, self.whole, self.replicate_group]
        return [group for group in dict.fromkeys(found) if group is not None]


def mesh_for_shards(process_group: Mesh | ProcessGroup | None) -> Mesh | ProcessGroup | None:
    """``process_group``, or the registered mesh, also where it has an axis besides those of the data: what is
    divided along that one may be divided further (``Home.replicas``)."""
    registered = registered_mesh() if process_group is None else None
    return registered if isinstance(registered, Mesh) else process_group


def shard_group_of(process_group: Mesh | ProcessGroup | None) -> Mesh | ProcessGroup | None:
    """What ``find_ranks`` is given for this rank's shard group: ``mesh["shard"]``, if there is one."""
    mesh = _sharded_mesh(process_group)
    return process_group if mesh is None else mesh["shard"]


def num_shard_groups(process_group: Mesh | ProcessGroup | None) -> int:
    """How many shard groups ``process_group`` is, or is one of."""
    mesh = mesh_for_replicas() if process_group is None else process_group
    if not isinstance(mesh, Mesh) or mesh.axes.size("shard") == 1:
        return 1
    return 1 if mesh.is_view and mesh.whole is not mesh.along["shard"] else mesh.axes.size("dp")


def find_shard_ranks(
    process_group: Mesh | ProcessGroup | None, timeout_s: float | None
) -> tuple[ShardRanks, Recorder]:
    """New groups over the ranks that ``process_group`` means, and where to record. Collective.

    Raises:
        PeerLost, ValueError: as ``find_ranks``.
    """
    mesh, find = _sharded_mesh(process_group), partial(find_ranks, what="sharding a module")
    shard_group, recorder = find(shard_group_of(process_group), timeout_s)
    weights, _ = find(shard_group_of(process_group), timeout_s)
    if mesh is None or mesh.axes.size("dp") == 1:
        return ShardRanks(shard_group, shard_group, weights, None), recorder
    replicate_group, _ = find(mesh["dp"], timeout_s)
    return ShardRanks(mesh.data.duplicate(), shard_group, weights, replicate_group), recorder


def _sharded_mesh(process_group: Mesh | ProcessGroup | None) -> Mesh | None:
    """The mesh that is meant, if it has a ``shard`` axis."""
    mesh = mesh_for_replicas() if process_group is None else process_group
    if isinstance(mesh, Mesh) and not mesh.is_view and mesh.axes.size("shard") > 1:
        return mesh
    return None
