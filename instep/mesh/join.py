"""Joining the world that this process was started in, and finding the ranks that a wrapper works over."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from instep.errors import PeerLost, warn
from instep.events import Recorder
from instep.launch.launch_environment import LaunchEnvironment, detect, is_address_of_loopback
from instep.launch.process_memory import keep_freed_memory
from instep.launch.rank_process import PARENT_LAUNCHERS, end_with_parent
from instep.mesh import mesh as current
from instep.mesh.axes import resolve
from instep.mesh.device_mesh import batch_group
from instep.mesh.mesh import Axis, Mesh, UnrankedMesh, build, mesh_for_replicas, no_store, registered_mesh
from instep.net import device as devices
from instep.net.hang_report import words_of
from instep.net.host_group import group_class
from instep.net.process_group import Group, default_store, from_store
from instep.net.store import MAKING, StoreClient, backend_timeout, rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store


TIMEOUT_S = 300.0
_refusals: list[str] = []
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # where torch looks for the number of threads


def init(
    *,
    dp: int = -1,
    shard: int = 1,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    threads: int = 1,
    outlive_launcher: bool = False,
) -> Mesh:
    """Join the world that this process was started in, and register its mesh.

    Reads the environment of instep's own launcher, torchrun, Slurm, Kubernetes (``PET_*``) or Open MPI;
    without any, the world is this process alone and there is no process group; a launched world of one has a
    group of one. An existing default group is used as it is and never destroyed. On CPU, freed memory stays
    with the process (``process_memory``): getting it again would take a tenth of a step.

    Args:
        dp, shard, pp, tp, ep: ranks per axis; one may be -1, "what is left". Their product is the world size.
            The ranks of ``shard`` are neighbours: ``fully_shard`` divides the state among them, and the ranks
            of ``dp`` have copies. For that, let it be the number of ranks on a host. Those of ``tp`` and
            ``ep`` compute the same micro-batches.
        backend: a torch.distributed backend; by default NCCL where this rank has a GPU, else shm where all
            ranks share a host, else gloo. With "shm" on several hosts, the groups of one host have it.
        device: "cuda" gives every rank of a host a GPU of its own, "cuda:0" puts all of them on that one
            (over gloo: NCCL wants a GPU per rank). By default "cuda" where there are GPUs and the backend is
            not a host backend (gloo, shm), else "cpu".
        timeout_s: the deadline of every wait, in seconds.
        threads: intra-op threads of a CPU rank, the same for one rank as for many: their number changes the
            order of sums inside some kernels.
        outlive_launcher: whether a rank of torchrun or mpirun trains on when that is killed.

    Returns:
        The mesh; ``close()`` gives back its groups.

    Raises:
        ValueError: the environment is half set, with no default group; the axes do not multiply to its size;
            there are too few GPUs, or ranks share one over NCCL.
        RuntimeError: under ``instep run``, whose ranks meet in the loop of an ``instep.Run``.
        PeerLost: a rank did not come within ``timeout_s``, or the network to it is cut.

    Example:
        >>> mesh = instep.init(timeout_s=60)  # started by torchrun --nproc-per-node 4, of 4 ranks
        >>> mesh.world_size, mesh.rank
        (1, 0)
    """
    if _refusals:
        raise RuntimeError(f"instep.init: {_refusals[0]}")
    axes: dict[str, Any] = {"dp": dp, "shard": shard, "pp": pp, "tp": tp, "ep": ep}
    is_joined = dist.is_initialized()
    try:
        started = detect(os.environ)
    except ValueError:  # programs that spawn their ranks may set WORLD_SIZE, and pass the rank as an argument
        if not is_joined:
            raise
        started = LaunchEnvironment()
    rank, world_size = started.rank, started.world_size
    if is_joined:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    resolve(world_size, **axes)  # before other ranks are waited for
    if started.source in PARENT_LAUNCHERS and not outlive_launcher:
        end_with_parent()
    local_rank, num_local = started.local_rank, started.local_world_size
    on_device, config = _choose(backend, device, local_rank, num_local, threads, one_host=started.one_host)
    joins = not is_joined and (world_size > 1 or started.source != "single")
    if joins and world_size > 1:
        _join(started, devices.complete(config), timeout_s)
    elif joins:  # so that a script's own dist.* goes on one rank as on two
        dist.init_process_group(devices.complete(config), store=dist.HashStore(), rank=0, world_size=1)
    store = default_store() if dist.is_initialized() else None
    mesh = build(
        store, rank, world_size, **axes, timeout_s=timeout_s, local_rank=local_rank, on_device=on_device
    )
    if joins:
        mesh.on_close.append(dist.destroy_process_group)
    return _register(mesh, config)


def refuse_init(why: str) -> None:
    """From now on ``init`` raises ``RuntimeError`` in this process, and says ``why``."""
    _refusals.append(why)


def join_store(
    store: Store | None,
    rank: int,
    world_size: int,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    threads: int = 1,
    local_rank: int = 0,
    **axes: int,
) -> Mesh:
    """A registered mesh over the ranks of a ``store``, all on this host; torch does not know its groups.

    For worlds that end and are made again in one process: torch has one default group per process, and
    destroying it waits for ranks that may be gone. Here ``close()`` waits for no rank, and the next world has
    another ``store``, or another prefix. There is one group per axis (one in all where an axis is the world);
    ``get("pg")`` makes its own on first use, by all of its ranks.

    Args:
        store: None for a world of one.
        backend, device, timeout_s, threads, axes: as in ``init``.

    Raises:
        ValueError: the axes do not multiply to the world size; or a device as in ``init``.
        PeerLost: a rank did not come within ``timeout_s``.
    """
    resolve(world_size, **axes)
    on_device, config = _choose(backend, device, local_rank, world_size, threads, one_host=True)
    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make = None if store is None else from_store(store, rank, timeout_s, config=devices.complete(config))
    mesh = build(
        store,
        rank,
        world_size,
        **axes,
        timeout_s=timeout_s,
        make_group=make,
        private=True,
        local_rank=local_rank,
        on_device=on_device,
    )
    return _register(mesh, config)


def await_rank(
    place: Callable[[], int],
    num_local: int,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    threads: int = 1,
) -> Mesh:
    """A registered mesh of this process alone, which will be one of ``num_local`` ranks later.

    ``place()`` is its local rank. A spare has none until it replaces a lost rank, so ``place`` may block; it
    is called when the program first reads the mesh's ``local_rank``, or its ``device`` if that is a GPU.
    """
    wanted = _prepare(backend, device, num_local, threads)
    on_device = cache(lambda: devices.activate(wanted, 0 if wanted.type == "cpu" else place()))
    axes = resolve(1, dp=1, shard=1, pp=1, tp=1)
    return _register(UnrankedMesh(axes, no_store, place=place, on_device=on_device, timeout_s=timeout_s))


def _choose(
    backend: str | None,
    device: str | torch.device | None,
    local_rank: int,
    num_local: int,
    threads: int,
    *,
    one_host: bool,
) -> tuple[torch.device, str]:
    """This rank's device, prepared, and its backend."""
    wanted = _prepare(backend, device, num_local, threads)
    backend = backend or devices.default_backend(wanted, one_host=one_host)
    return devices.activate(wanted, local_rank), backend


def _prepare(
    backend: str | None, device: str | torch.device | None, num_local: int, threads: int
) -> torch.device:
    wanted = devices.resolve(device, backend, num_local)
    if wanted.type == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory(os.environ)
    return wanted


def _register(mesh: Mesh, backend: str = "") -> Mesh:
    """``mesh``, as the default mesh until it is closed.

    Raises:
        ValueError: ranks share a GPU over NCCL; on every rank alike.
    """
    if "nccl" in backend and not devices.nccl_shares_gpus(os.environ):
        _require_own_gpus(mesh)
    current.get.register_mesh(mesh)
    mesh.on_close.append(lambda: current.unregister(mesh))
    return mesh


def _require_own_gpus(mesh: Mesh) -> None:
    """Raise ``ValueError``, on every rank alike, if two ranks of the world compute on one GPU."""
    owners = dict[int, int]()
    for peer in mesh.world.group.peers.table:
        other = owners.setdefault(peer.gpu, peer.rank)
        if peer.gpu and other != peer.rank:
            mesh.close()
            raise ValueError(
                f"ranks {other} and {peer.rank} share a GPU of host {peer.host}, and this NCCL wants one per "
                "rank: pass backend='gloo', or start as many ranks as GPUs (NCCL 2.30 shares one where "
                "NCCL_MULTI_RANK_GPU_ENABLE=1)"
            )


def _join(started: LaunchEnvironment, backend: str, timeout_s: float) -> None:
    """Make torch's default group of the world that ``started`` describes."""
    if started.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, size, file = started.rank, started.world_size, started.store_file
    store = _reach_store(started, timeout_s) if file is None else dist.FileStore(file, size)

    def construct(own: Store) -> None:
        timeout = backend_timeout(timeout_s)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)

    # A world that is restarted, or joined again, must not read what its predecessor wrote.
    rendezvous(store, f"world/{started.restart_count}", range(size), rank, timeout_s, construct)


def _reach_store(started: LaunchEnvironment, timeout_s: float) -> Store:
    """The store of a world that meets by network, by the deadline; rank 0 holds it, or torchrun's agent."""
    holder = "torchrun" if started.source == "torchrun" else "rank 0"
    host = started.master_addr if holder == "torchrun" else started.store_addr
    port, is_master = started.master_port, started.rank == 0 and holder == "rank 0"
    assert host is not None and port is not None

    def make() -> Store:
        listener = _listen(host, port, one_host=started.one_host) if is_master else None
        return dist.TCPStore(
            host,
            port,
            started.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # the rendezvous waits, and names the ranks that have not come
            multi_tenant=True,  # a world that is joined again may find the store of the last one
            master_listen_fd=None if listener is None else listener.detach(),
        )

    try:
        return StoreClient(started.rank).call(make, backend_timeout(timeout_s).total_seconds())
    except (dist.DistNetworkError, TimeoutError) as error:
        if is_master and "EADDRINUSE" in str(error):
            raise ValueError(
                f"rank 0 cannot listen at {host}: port {port} is in use by another process; set MASTER_PORT "
                "to a free port, the same for all ranks"
            ) from None
        if is_master:
            raise
        raise PeerLost(
            f"rank {started.rank} of {started.world_size} does not reach the store of {holder} at "
            f"{started.master_addr} port {port}: look whether {holder} runs there and not another program, "
            f"and whether the network lets this host through, or raise timeout_s ({timeout_s:g} s). "
            f"Cause: {words_of(error)}",
            ranks=() if holder == "torchrun" else (0,),
            operation="joining the world",
        ) from None


def _listen(host: str, port: int, *, one_host: bool) -> socket.socket | None:
    """A socket that listens at ``host`` and nowhere else, where torch's own would listen on all interfaces.

    None where the port is taken, perhaps by the store that this process has opened before, which torch knows;
    and, with a warning, where ``host`` is no address of this one, or none that other hosts can reach: behind
    a network's translation of addresses, or where a host calls itself 127.0.1.1.
    """
    for family, address in _addresses(host, port):
        if not one_host and is_address_of_loopback(address[0]):
            continue
        try:
            return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    warn(
        f"the store of rank 0 listens on all interfaces, because {host} is no address of this host that "
        "others can come to: set MASTER_ADDR to one that is",
    )
    return None


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of ``host``, those of IPv4 first, which every rank can reach."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"expected a name or an address of rank 0's host, got {host!r} ({error.strerror}): set "
            "MASTER_ADDR to one that every rank can look up"
        ) from error
    return sorted((family, address) for family, _, _, _, address in found)  # AF_INET is below AF_INET6


def warn_of_default_threads() -> None:
    """Warn if operators have as many threads as there are cores, because nothing has set another number.

    Ranks that torchrun starts have one thread each where there are several ranks, and all cores where there
    is one; with other numbers kernels add in another order. ``init`` sets the number; here the user has made
    the group, or has none, and could not see why the bits differ from those of several ranks.
    """
    num_threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    is_set = registered_mesh() is not None or any(name in os.environ for name in THREADS)
    if is_set or num_threads == 1 or num_threads not in (cores, cores // 2):  # torch takes either by itself
        return
    warn(
        f"bits depend on the threads per rank: {num_threads} here, as the machine has cores, but 1 where "
        "torchrun starts several ranks. Call instep.init(), or set OMP_NUM_THREADS for both",
    )


def find_ranks(
    process_group: Mesh | DeviceMesh | ProcessGroup | None,
    timeout_s: float | None = None,
    *,
    what: str = "wrapping a model",
    by_host: bool = False,
) -> tuple[Group, Recorder]:
    """A new group over the ranks that ``process_group`` means, and the recorder for their events.

    A mesh means its ``dp`` axis, and ``shard`` with it if there is one; torch's ``DeviceMesh`` its one dim,
    or the one with such a name. None means the registered mesh, else torch's default group, else this process
    alone. ``by_host``: a ``HostGroup``, in which the ranks of a host share memory. Collective over those
    ranks; errors call it ``what``.

    Raises:
        PeerLost: not all of them came.
        ValueError: this process was started as one of many, but has joined no group; or the registered mesh
            has an axis that nothing would use.
    """
    meant = ranks_meant(process_group)
    try:
        if isinstance(meant, Mesh):
            return _axis(meant).duplicate(by_host=by_host), meant.recorder
        ranks, rank, pg = [0], 0, None
        if meant is not None:
            ranks, rank = dist.get_process_group_ranks(meant), dist.get_rank()
        if meant is not None and len(ranks) > 1:
            make = from_store(default_store(), rank, timeout_s or TIMEOUT_S, meant)
            pg = make("duplicate", ranks)
        return group_class(pg, by_host=by_host)(pg, ranks, rank, timeout_s or TIMEOUT_S), Recorder(rank)
    except (dist.DistError, PeerLost) as error:  # the former from a maker of others
        raise PeerLost(
            f"{what} makes a group of its ranks, and one of them never came: do it on every rank, as often "
            f"and in the same order: {error}",
            ranks=getattr(error, "ranks", ()),
            operation=MAKING,
        ) from None


def ranks_meant(process_group: Mesh | DeviceMesh | ProcessGroup | None) -> Mesh | ProcessGroup | None:
    """The mesh or group that ``process_group`` means; None: this process alone. Raises as ``find_ranks``."""
    meant = _meant(process_group)
    if meant is None and (started := detect(os.environ)).world_size > 1:
        raise ValueError(
            f"this process is rank {started.rank} of {started.world_size} ({started.source}), but joined no "
            "group: call instep.init() first, or every rank would train a model of its own"
        )
    return meant


def num_ranks() -> int:
    """The number of ranks that ``find_ranks(None)`` would find."""
    meant = _meant(None)
    if meant is None:
        return 1
    return _axis(meant).size if isinstance(meant, Mesh) else meant.size()


def require_one_rank(what: str) -> None:
    """Refuse ``what``, which reduces inside of one process, if that is one of several ranks.

    Raises:
        ValueError: it is, or was started as one.
    """
    ranks_meant(None)
    if num_ranks() > 1:
        raise ValueError(
            f"{what} adds the gradients of this process alone, but it is one of {num_ranks()} ranks, and "
            "each would train a model of its own: use instep.DataParallel, with a rank for every thread, or "
            "start one process; where only this rank is to train, pass alone=True"
        )


def _meant(process_group: Mesh | DeviceMesh | ProcessGroup | None) -> Mesh | ProcessGroup | None:
    meant = mesh_for_replicas() if process_group is None else process_group
    return batch_group(meant) if isinstance(meant, DeviceMesh) else meant or dist.group.WORLD


def _axis(mesh: Mesh) -> Axis:
    return mesh.whole if mesh.is_view else mesh.data
