"""The ranks' processors and links, floating-point operations of a model, and seconds of a collective.

    ranks of one host    a link per rank: ``local_us`` and ``local_gb_per_s``
    hosts                a link per rank: ``remote_us`` and ``remote_gb_per_s``

Neighbours along the mesh's last axes share a host: ``tp`` first, then ``ep``, ``shard``, ``dp``, ``pp``.
Steps and bytes of the collectives are those of ``instep.comm.cost``, in closed form for any number of ranks:

    ordered      a header, W-1 slices there, W-1 sums back: 2 (W-1) + 1 messages, 2 (W-1)/W S bytes
    ring         2 (W-1) messages, 2 (W-1)/W S bytes; within hosts first, then between counterparts, where an
                 all-reduce takes a double binary tree if its 2 log2 H messages and 2 S bytes take less time

Sources: R. Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005 (ring); P.
Sanders et al., "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; operations: D.
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, appendix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from instep.comm.cost import AlphaBeta
from instep.mesh.axes import ORDER
from instep.plan.memory_estimate import Placement
from instep.plan.model import Transformer, block


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hardware of every rank; the defaults are an A100-80GB in a host of 8 with InfiniBand HDR. Peaks are of
    NVIDIA's data sheet; efficiency and latencies are assumed until they are measured."""

    tflops: float = 312
    """Peak of a rank's processor, in 10^12 operations per second."""
    efficiency: float = 0.55
    """Share of the peak that the products of a model reach."""
    memory_gb_per_s: float = 2039
    """Memory bandwidth of a rank."""
    ranks_per_host: int = 8
    """Ranks that share the local links."""
    local_us: float = 5
    """Latency of a message within a host, in microseconds."""
    local_gb_per_s: float = 300
    """Bandwidth of a rank within its host, in one direction."""
    remote_us: float = 10
    """Latency of a message between hosts, in microseconds."""
    remote_gb_per_s: float = 25
    """Bandwidth of a rank between hosts, in one direction."""
    collectives: Literal["ordered", "ring"] = "ordered"
    """ordered: instep's exchanges; ring: NCCL's all-reduce, ordered=False."""
    busy: float = 0.0
    """Share of hidden communication by which computation gets longer: 1 on a host without an idle core."""

    def check(self) -> None:
        """Raise ``ValueError`` for what cannot be."""
        rates = "memory_gb_per_s", "local_gb_per_s", "remote_gb_per_s"
        for name in ("tflops", "efficiency", "ranks_per_host", *rates):
            if not getattr(self, name) > 0:
                raise ValueError(f"cluster.{name}: expected more than 0, got {getattr(self, name)}")
        if min(self.local_us, self.remote_us) < 0 or self.efficiency > 1 or not 0 <= self.busy <= 1:
            raise ValueError(
                "cluster: expected local_us and remote_us >= 0, efficiency <= 1 and busy from 0 to 1, got "
                f"{self.local_us}, {self.remote_us}, {self.efficiency} and {self.busy}"
            )

    @property
    def flops_per_s(self) -> float:
        return self.tflops * 1e12 * self.efficiency

    @property
    def local(self) -> AlphaBeta:
        return AlphaBeta(self.local_us * 1e-6, 1e-9 / self.local_gb_per_s)

    @property
    def remote(self) -> AlphaBeta:
        return AlphaBeta(self.remote_us * 1e-6, 1e-9 / self.remote_gb_per_s)

    def group(self, placement: Placement, *axes: str) -> AxisGroup:
        """The ranks along ``axes``, which are neighbours in the mesh."""
        sizes = [getattr(placement, axis) for axis in ORDER]
        inner = math.prod(sizes[max(ORDER.index(axis) for axis in axes) + 1 :])
        size = math.prod(getattr(placement, axis) for axis in axes)
        here = min(max(self.ranks_per_host // inner, 1), size)
        return AxisGroup(here, -(-size // here))


class AxisGroup(NamedTuple):
    """Ranks of a collective: ``local`` on each of ``hosts`` hosts."""

    local: int
    hosts: int

    @property
    def size(self) -> int:
        return self.local * self.hosts


def all_reduce_s(cluster: Cluster, group: AxisGroup, num_bytes: float) -> float:
    """Seconds in which all ranks get the sum of ``num_bytes`` each."""
    return 2 * _half_s(cluster, group, num_bytes, tree=True) + _header_s(cluster, group)


def reduce_scatter_s(cluster: Cluster, group: AxisGroup, num_bytes: float) -> float:
    """Seconds of one half: each rank gets its slice of the sum."""
    return _half_s(cluster, group, num_bytes) + _header_s(cluster, group)


def all_gather_s(cluster: Cluster, group: AxisGroup, num_bytes: float) -> float:
    """Seconds in which all ranks get ``num_bytes``, a slice from each."""
    return _half_s(cluster, group, num_bytes)


def message_s(cluster: Cluster, group: AxisGroup, num_bytes: float) -> float:
    """Seconds for one message between neighbours of a group."""
    return (cluster.remote if group.hosts > 1 else cluster.local).time_s(num_bytes)


def _header_s(cluster: Cluster, group: AxisGroup) -> float:
    """Seconds in which ranks agree before they add."""
    return message_s(cluster, group, 0) if group.size > 1 and cluster.collectives == "ordered" else 0.0


def _half_s(cluster: Cluster, group: AxisGroup, num_bytes: float, *, tree: bool = False) -> float:
    g, hosts = group
    size, local, remote = group.size, cluster.local, cluster.remote
    if cluster.collectives == "ordered":
        there = num_bytes / size
        return (g - 1) * local.time_s(there) + (size - g) * remote.time_s(there)
    ring = (hosts - 1) * remote.time_s(num_bytes / g / hosts)
    if tree:
        ring = min(ring, math.log2(hosts) * remote.latency_s + num_bytes / g * remote.s_per_byte)
    return (g - 1) * local.time_s(num_bytes / g) + ring


def block_flops(model: Transformer, tokens: int, *, expert_load: float = 1.0) -> float:
    """Operations of one block's forward on ``tokens``; ``expert_load``: of the fullest expert, over the mean.

    A product of T x a by a x b takes 2 T a b. Attention counts the whole matrix, as the literature does, not
    the half that a causal kernel computes.
    """
    rows = {"ep": tokens * model.top_k * expert_load / max(model.experts, 1)}
    weights = [one for one in block(model) if one.name != "norms" and not one.name.startswith("bias")]
    products = sum(2 * rows.get(one.cut, tokens) * one.size for one in weights)
    return products + (4 * tokens * model.context * model.width if model.heads else 0)


def output_flops(model: Transformer, tokens: int) -> float:
    """Operations of the output layer's forward."""
    return 2.0 * tokens * model.width * model.vocab_size


def step_flops(model: Transformer, tokens: int, *, recomputed: bool = False) -> float:
    """Operations of forward and backward, which takes two forwards; with ``recomputed`` blocks a fourth.

    Without it these are the *model FLOPs* of the model FLOPs utilisation.
    """
    blocks = model.layers * block_flops(model, tokens)
    return (4 if recomputed else 3) * blocks + 3 * output_flops(model, tokens)


CLUSTERS = {
    "a100": Cluster(),
    # Data sheet of the H100 SXM; a host with a 400 Gbit/s card per GPU.
    "h100": Cluster(tflops=989, memory_gb_per_s=3350, local_gb_per_s=450, remote_gb_per_s=50),
}
