"""Joining the world that this process was started in, whoever started it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from instep.mesh import current, device
from instep.mesh.allocator import keep_freed_memory
from instep.mesh.axes import resolve
from instep.mesh.groups import backend_timeout, default_store, from_store
from instep.mesh.mesh import Mesh, build
from instep.mesh.place import Place, detect

if TYPE_CHECKING:
    from torch.distributed import Store


def init(
    *,
    dp: int = -1,
    shard: int = 1,
    pp: int = 1,
    tp: int = 1,
    backend: str | None = None,
    timeout_s: float = 300.0,
    threads: int = 1,
) -> Mesh:
    """Join the world that this process was started in, and register its mesh.

    Reads the environment of instep's own launcher, torchrun, Slurm, Kubernetes (``PET_*``) or Open MPI;
    without any, the world is this process alone and there is no process group. A default group that is
    already there is used as it is and never destroyed. On CPU, memory that is freed stays with the process
    (``mesh.allocator``), whose steps would else spend a tenth of their time on getting it again.

    Args:
        dp, shard, pp, tp: ranks per axis; one may be -1, "what is left". Their product is the world size. The
            ranks of ``shard`` are neighbours: what ``fully_shard`` divides among them, the ranks of ``dp``
            have copies of. For that, let it be the number of ranks on a host.
        backend: a torch.distributed backend; by default NCCL where this rank has a GPU, else shm where all
            ranks share a host, else gloo. With "shm" on several hosts, the groups of one host have it.
        timeout_s: the deadline of every wait, in seconds.
        threads: intra-op threads of a CPU rank. The same number for one rank as for many, because the
            number of threads changes the order of sums inside some kernels.

    Raises:
        ValueError: the environment is half set, or the axes do not multiply to the world size.
    """
    place = detect(os.environ)
    if dist.is_initialized():
        rank, world_size, joins = dist.get_rank(), dist.get_world_size(), False
    else:
        rank, world_size, joins = place.rank, place.world_size, place.world_size > 1
    resolve(world_size, dp=dp, shard=shard, pp=pp, tp=tp)  # before anybody is waited for
    one_host = place.local_world_size == place.world_size
    on_device, config = _choose(backend, place.local_rank, place.local_world_size, threads, one_host=one_host)
    if joins:
        _join(place, device.complete(config), timeout_s)
    mesh = build(
        default_store() if dist.is_initialized() else None,
        rank,
        world_size,
        dp=dp,
        shard=shard,
        pp=pp,
        tp=tp,
        timeout_s=timeout_s,
        local_rank=place.local_rank,
        on_device=on_device,
    )
    if joins:
        mesh.on_close.append(dist.destroy_process_group)
    return _registered(mesh)


def meet(
    store: Store | None,
    rank: int,
    world_size: int,
    *,
    backend: str | None = None,
    timeout_s: float = 300.0,
    threads: int = 1,
    local_rank: int = 0,
    num_local: int | None = None,
    dp: int = -1,
    shard: int = 1,
    pp: int = 1,
    tp: int = 1,
) -> Mesh:
    """A registered mesh over whoever meets in ``store``, of groups that torch.distributed does not know.

    For worlds that end and are made again in one process: torch's default group can be had once, and
    destroying it waits for ranks that may be gone. Here ``close()`` waits for nobody, whatever has happened
    to the others, and the next world meets in another ``store`` or under another prefix. Every group costs a
    meeting, so there is one per axis (one in all where an axis is the world), and ``get("pg")`` makes its own
    when it is first asked for, by all of its ranks.

    Args:
        store: where all ``world_size`` ranks meet; None for a world of one.
        num_local: ranks on this host, by default all of them.
        backend, timeout_s, threads, dp, shard, pp, tp: as in ``init``.

    Raises:
        ValueError: the axes do not multiply to the world size.
        PeerLost, torch.distributed.DistError: a rank did not come to the meeting within ``timeout_s``.
    """
    resolve(world_size, dp=dp, shard=shard, pp=pp, tp=tp)
    num_local = world_size if num_local is None else num_local
    one_host = num_local == world_size
    on_device, config = _choose(backend, local_rank, num_local, threads, one_host=one_host)
    if one_host and world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = device.complete(config)
    mesh = build(
        store,
        rank,
        world_size,
        dp=dp,
        shard=shard,
        pp=pp,
        tp=tp,
        timeout_s=timeout_s,
        make_group=None if store is None else from_store(store, rank, timeout_s, config=config),
        private=True,
        local_rank=local_rank,
        on_device=on_device,
    )
    return _registered(mesh)


def unjoined() -> Place | None:
    """Where this process was started in a world of several that nobody has joined yet, or None."""
    place = detect(os.environ)
    return place if place.world_size > 1 and not dist.is_initialized() else None


def _choose(
    backend: str | None, local_rank: int, num_local: int, threads: int, *, one_host: bool
) -> tuple[torch.device, str]:
    """This rank's device, made ready for ``threads``, and the backend: ``backend``, or the device's own."""
    on_device = device.choose(local_rank, num_local, backend)
    if on_device.type == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory(os.environ)
    return on_device, backend or device.default_backend(on_device, one_host=one_host)


def _registered(mesh: Mesh) -> Mesh:
    """``mesh``, the one that is found where none is named, until it is closed."""
    current.get.register_mesh(mesh)
    mesh.on_close.append(lambda: current.forget(mesh))
    return mesh


def _join(place: Place, backend: str, timeout_s: float) -> None:
    """Make torch's default group out of ``place``."""
    timeout = timedelta(seconds=timeout_s)
    store: Store
    if place.store_file is not None:
        store = dist.FileStore(place.store_file, place.world_size)
    else:
        assert place.master_addr is not None and place.master_port is not None
        # Under torchrun the agent holds the store; elsewhere rank 0 does.
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            place.world_size,
            is_master=place.rank == 0 and place.source != "torchrun",
            timeout=timeout,
            multi_tenant=True,  # a world that is joined again may find the store of the last one
        )
    # A world that is restarted, or joined again, must not read what its predecessor wrote.
    again = store.add(f"instep/joined/{place.restart_count}/rank {place.rank}", 1)
    store = dist.PrefixStore(f"instep/world/{place.restart_count}/{again}", store)
    if place.local_world_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=backend_timeout(timeout_s),
    )
