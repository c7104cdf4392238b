"""The ranks of a run as a grid, with the process groups of every axis, and joining a world.

Every axis has two groups over the same ranks: ``pg``, which is the user's, and a private one for instep's
own exchanges. Backends pair operations by issue order alone, so a collective that a user starts between
two of ours on the same group would exchange numbers with it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from instep.events import Recorder
from instep.mesh import current, device
from instep.mesh.axes import Axes, resolve
from instep.mesh.group import Group
from instep.mesh.place import Place, detect

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

MakeGroup = Callable[[str, Sequence[int]], "ProcessGroup"]
# A backend's own limit only has to be later than ours, which names the rank.
BACKEND_PATIENCE = 4


class Axis:
    """The ranks that differ from this one along one axis (or all of them, for the whole world).

    ``pg`` is the user's process group, None where there is one rank; ``group`` wraps it for the thread
    that runs the training loop; ``private`` wraps the group that only instep uses.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, make: MakeGroup, timeout_s: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        alone = self.size == 1
        self.pg = None if alone else make(name, self.ranks)
        self.group = Group(self.pg, self.ranks, rank, timeout_s)
        self.private = Group(
            None if alone else make(f"{name}/instep", self.ranks), self.ranks, rank, timeout_s
        )


class Mesh:
    """Named axes over the ranks of a world, with this rank's place on each.

    ``mesh["dp"]`` is the same mesh seen along one axis: what ``process_group=`` and ``get(..., mesh=)``
    take. ``recorder`` receives the spans of whoever was handed this mesh. ``close()`` gives back the
    groups that the mesh made; groups that were there before stay.
    """

    def __init__(
        self,
        axes: Axes,
        rank: int,
        make: MakeGroup,
        *,
        local_rank: int = 0,
        on_device: torch.device | None = None,
        timeout_s: float = 300.0,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.axes = axes
        self.rank = rank
        self.local_rank = local_rank
        self.device = on_device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.recorder = Recorder(rank)
        self._focus: str | None = None
        self._made: list[ProcessGroup] = []
        self._on_close = list(on_close)

        def make_and_keep(name: str, ranks: Sequence[int]) -> ProcessGroup:
            pg = make(name, ranks)
            self._made.append(pg)
            return pg

        self.along = {
            name: Axis(name, axes.peers(name, rank), rank, make_and_keep, timeout_s) for name in axes.names
        }
        busy = [axis for axis in self.along.values() if axis.size == axes.world_size]
        everyone = range(axes.world_size)
        self.world = busy[-1] if busy else Axis("world", everyone, rank, make_and_keep, timeout_s)

    @property
    def is_view(self) -> bool:
        """Whether this is ``mesh[axis]``."""
        return self._focus is not None

    @property
    def whole(self) -> Axis:
        """The one axis of a view ``mesh[axis]``; else all the ranks of the world."""
        return self.world if self._focus is None else self.along[self._focus]

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on every axis."""
        return self.axes.coordinates(self.rank)

    def __getitem__(self, axis: str) -> Mesh:
        self.axes.size(axis)  # raises by name
        view = copy.copy(self)
        view._focus = axis
        return view

    def close(self) -> None:
        """Destroy the groups that this mesh made. Call it on all ranks, after the last operation."""
        if current.registered() is self:
            current.get.register_mesh(None)
        for pg in reversed(self._made):
            if dist.is_initialized() and pg in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(pg)
        self._made.clear()
        while self._on_close:
            self._on_close.pop()()


def build(
    store: Store | None,
    rank: int,
    world_size: int,
    *,
    dp: int = -1,
    pp: int = 1,
    tp: int = 1,
    timeout_s: float = 300.0,
    make_group: MakeGroup | None = None,
    local_rank: int = 0,
    on_device: torch.device | None = None,
    on_close: Sequence[Callable[[], None]] = (),
) -> Mesh:
    """A mesh over an existing world; ``make_group`` makes the groups where torch's default group does not.

    ``store`` is only there for a ``make_group`` that rendezvous through it; torch's own needs none.
    """
    del store
    make = make_group or _new_group(timeout_s)
    return Mesh(
        resolve(world_size, dp=dp, pp=pp, tp=tp),
        rank,
        make,
        local_rank=local_rank,
        on_device=on_device,
        timeout_s=timeout_s,
        on_close=on_close,
    )


def init(
    *,
    dp: int = -1,
    pp: int = 1,
    tp: int = 1,
    backend: str | None = None,
    timeout_s: float = 300.0,
    threads: int = 1,
) -> Mesh:
    """Join the world that this process was started in, and register its mesh.

    Reads the environment of instep's own launcher, torchrun, Slurm, Kubernetes (``PET_*``) or Open MPI;
    without any, the world is this process alone and there is no process group. A default group that is
    already there is used as it is and never destroyed.

    Args:
        dp, pp, tp: ranks per axis; one may be -1, "what is left". Their product is the world size.
        backend: a torch.distributed backend; by default NCCL where this rank has a GPU, else gloo.
        timeout_s: the deadline of every wait, in seconds.
        threads: intra-op threads of a CPU rank. The same number for one rank as for many, because the
            number of threads changes the order of sums inside some kernels.

    Raises:
        ValueError: the environment is half set, or the axes do not multiply to the world size.
    """
    place = detect(os.environ)
    if dist.is_initialized():
        rank, world_size, on_close = dist.get_rank(), dist.get_world_size(), []
    else:
        rank, world_size, on_close = place.rank, place.world_size, [_leave]
    on_device = device.choose(place.local_rank, backend)
    if on_device.type == "cpu":
        torch.set_num_threads(threads)
    if world_size > 1 and on_close:
        _join(place, backend or device.default_backend(on_device), timeout_s)
    mesh = build(
        None,
        rank,
        world_size,
        dp=dp,
        pp=pp,
        tp=tp,
        timeout_s=timeout_s,
        local_rank=place.local_rank,
        on_device=on_device,
        on_close=on_close,
    )
    current.get.register_mesh(mesh)
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
        )
    # A restarted world must not read what its predecessor wrote under the same keys.
    store = dist.PrefixStore(f"instep/{place.restart_count}", store)
    if place.local_world_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout * BACKEND_PATIENCE,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_group(timeout_s: float) -> MakeGroup:
    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        pg = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s * BACKEND_PATIENCE),
            use_local_synchronization=True,
            group_desc=f"instep {name}",
        )
        assert pg is not None
        return pg

    return make
