"""The ranks of a run as a grid, with a process group for every axis; and the registered mesh of a process.

The registered mesh is the default of ``get("rank")`` and of ``process_group=None``. It, the table of owners
(``reduce/owners.py``) and the optimizer-step hook of ``step/optimizer_guard.py`` are the only process-wide
state. The main thread registers a mesh for all threads of the process; any other thread, such as a rank in a
test, registers one for itself.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from instep.errors import counted
from instep.events import Recorder
from instep.mesh.axes import DATA_AXES, MODEL_AXES, Axes, resolve
from instep.mesh.device_mesh import batch_group, place_in, require_used
from instep.net.host_group import group_class
from instep.net.peers import Peer
from instep.net.process_group import Group, MakeGroup, destroy, from_store, registered_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


class Axis:
    """The ranks that differ from this one along one axis only; for the world axis, all ranks.

    ``pg`` is the user's process group, None for one rank. ``group`` is for the thread of the training loop,
    and ``duplicate()`` creates another group over the same ranks. Without ``shared``, ``pg`` is created on
    first access, by all its ranks: most programs never use it. ``table`` has the processes of all ranks of
    the world; the world axis, which has none yet, exchanges their records.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        shared: MakeGroup | None,
        own: MakeGroup,
        timeout_s: float,
        table: Sequence[Peer] | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self._own = own
        self._table = table
        self._num_duplicates = 0
        self._closed = False
        self._pg = None if self.size == 1 or shared is None else shared(name, self.ranks)
        self.group = self.duplicate()
        self._table = table or self.group.peers.table

    @property
    def pg(self) -> ProcessGroup | None:
        """The group for the user's own collectives."""
        if self._pg is None and self.size > 1 and not self._closed:
            self._pg = self._own(self.name, self.ranks)
        return self._pg

    def close(self) -> None:
        """Close ``pg`` and ``group``, without waiting for other ranks."""
        self._closed = True
        self.group.close()
        if self._pg is not None:
            destroy(self._pg)
        self._pg = None

    def duplicate(self, *, by_host: bool = False) -> Group:
        """A new group over the same ranks, for one user in one thread. Collective over the axis.

        ``by_host``: a ``HostGroup``.
        """
        self._num_duplicates += 1
        name = f"{self.name}/instep/{self._num_duplicates}"
        rank = self.ranks[self.rank]
        pg = None if self.size == 1 else self._own(name, self.ranks)
        kind = group_class(pg, by_host=by_host)
        return kind(pg, self.ranks, rank, self.timeout_s, self._table, name)


class Mesh:
    """Named axes over the ranks of a world, with this rank's place on each; ``instep.init`` makes it.

    ``mesh["dp"]`` is the same mesh seen along one axis: what ``process_group=`` and ``get(..., mesh=)``
    take. The axes are "dp", "shard", "pp", "tp" and "ep"; another one is a ``ValueError``.

    Attributes:
        axes: their names and sizes: ``axes.size("dp")``.
        rank: the global rank of this process.
        local_rank: its rank on this host.
        device: the ``torch.device`` of this rank.
        timeout_s: the deadline of every wait, in seconds.
        recorder: receives the spans of all that use this mesh.
        along: by the name of an axis, this rank's group along it: ``along["dp"].ranks`` are global ranks.
        world: the group of all ranks.
        data: the ranks of ``dp`` and ``shard``, among which the batch is shared out.
        model: the ranks of ``tp`` and ``ep``, which compute the same micro-batches together.
        on_close: functions to be called by ``close``, the last first.

    Example:
        >>> mesh = instep.init()
        >>> print(mesh)
        <mesh dp(1) = 1 rank on cpu; this is rank 0, dp=0>
        >>> mesh.world_size, mesh.size, mesh["dp"].size
        (1, 1, 1)
        >>> mesh.coordinates
        {'pp': 0, 'dp': 0, 'shard': 0, 'ep': 0, 'tp': 0}
        >>> mesh.is_view, mesh["dp"].is_view, mesh["dp"].whole.ranks
        (False, True, (0,))
        >>> mesh.close()
    """

    def __init__(
        self,
        axes: Axes,
        rank: int,
        shared: MakeGroup | None,
        own: MakeGroup,
        *,
        local_rank: int = 0,
        on_device: torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.axes = axes
        self.rank = rank
        self.local_rank = local_rank
        self.device = on_device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.recorder = Recorder(rank)
        self._focus: str | None = None
        self.on_close: list[Callable[[], None]] = []

        whole = [name for name in axes.names if axes.size(name) == axes.world_size] or ["world"]
        self.world = Axis(whole[-1], range(axes.world_size), rank, shared, own, timeout_s)
        table = self.world.group.peers.table  # exchanged once; the other axes have slices of it

        def along(name: str) -> Axis:
            return Axis(name, axes.peers(name, rank), rank, shared, own, timeout_s, table)

        self.along = {name: self.world if name == whole[-1] else along(name) for name in axes.names}

        def over(name: str, several: Sequence[str]) -> Axis:
            ranks = axes.peers_along(several, rank)
            known = [*(self.along[each] for each in several), self.world]
            same = next((axis for axis in known if axis.ranks == ranks), None)
            return same or Axis(name, ranks, rank, None, own, timeout_s, table)

        self.data, self.model = over("data", DATA_AXES), over("model", MODEL_AXES)

    @property
    def is_view(self) -> bool:
        """Whether this is ``mesh[axis]``."""
        return self._focus is not None

    @property
    def whole(self) -> Axis:
        """The one axis of a view ``mesh[axis]``; else all the ranks of the world."""
        return self.world if self._focus is None else self.along[self._focus]

    @property
    def size(self) -> int:
        """The number of ranks: of the world, or of the one axis of a view ``mesh[axis]``."""
        return self.whole.size

    @property
    def world_size(self) -> int:
        """The number of ranks of the world."""
        return self.axes.world_size

    def __repr__(self) -> str:
        used = [name for name in self.axes.names if self.axes.size(name) > 1] or ["dp"]
        names = used if self._focus is None else [self._focus]
        sizes = " * ".join(f"{name}({self.axes.size(name)})" for name in names)
        place = ", ".join(f"{name}={self.coordinates[name]}" for name in names)
        ranks = counted(self.size, "rank")
        return f"<mesh {sizes} = {ranks} on {self.device}; this is rank {self.rank}, {place}>"

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
        """Close the groups that this mesh created, then call the functions in ``on_close``, last one first.

        Call it at the end on all remaining ranks; it does not wait for them. Groups that existed before the
        mesh stay open. The mesh is unregistered.
        """
        for axis in dict.fromkeys([self.world, self.data, self.model, *reversed(self.along.values())]):
            axis.close()
        while self.on_close:
            self.on_close.pop()()


class UnrankedMesh(Mesh):
    """The mesh of a process without a rank yet: models can be wrapped with it.

    It refuses to name a rank or a size: anything that a script computes from them now would be wrong later.
    """

    def __init__(
        self,
        axes: Axes,
        own: MakeGroup,
        *,
        place: Callable[[], int],
        on_device: Callable[[], torch.device],
        timeout_s: float = 300.0,
    ) -> None:
        self._place, self._on_device = place, on_device
        super().__init__(axes, 0, None, own, timeout_s=timeout_s)

    NO_RANK = (
        "this process has no rank yet: under `instep run` ranks are assigned where the loop over run.steps "
        "begins, so that a process can replace a lost one. Ask for rank and size inside that loop, and read "
        "data with instep.Loader, which distributes the samples"
    )

    @property
    def rank(self) -> int:
        """Not known yet."""
        raise ValueError(self.NO_RANK)

    @rank.setter
    def rank(self, rank: int) -> None:
        """Ignored: there is none yet."""

    @property
    def local_rank(self) -> int:
        """The local rank of the process that this one replaces; a spare blocks here until a rank is lost."""
        return self._place()

    @local_rank.setter
    def local_rank(self, local_rank: int) -> None:
        """Ignored: ``place`` knows it."""

    @property
    def device(self) -> torch.device:
        """The device of this process; a spare blocks here until a rank is lost, and takes its GPU."""
        return self._on_device()

    @device.setter
    def device(self, device: torch.device) -> None:
        """As ``local_rank``."""

    @property
    def whole(self) -> Axis:
        """Not known yet."""
        raise ValueError(self.NO_RANK)

    @property
    def world_size(self) -> int:
        """Not known yet."""
        raise ValueError(self.NO_RANK)

    def __repr__(self) -> str:
        return "<mesh of a process without a rank yet>"


def build(
    store: Store | None,
    rank: int,
    world_size: int,
    *,
    dp: int = -1,
    shard: int = 1,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    timeout_s: float = 300.0,
    make_group: MakeGroup | None = None,
    private: bool = False,
    local_rank: int = 0,
    on_device: torch.device | None = None,
) -> Mesh:
    """A mesh over the ranks that share ``store`` (None for one rank). Collective.

    If torch has a default group, the groups of the axes are registered with torch.distributed. ``make_group``
    creates all groups instead; with ``private`` the user's groups are created on first access.
    """
    axes = resolve(world_size, dp=dp, shard=shard, pp=pp, tp=tp, ep=ep)
    own = make_group or (no_store if store is None else from_store(store, rank, timeout_s))
    shared = None if private else own
    if make_group is None and dist.is_initialized():
        partitions = {name: axes.partition(name) for name in axes.names}
        shared = registered_groups({**partitions, "world": [range(world_size)]}, rank, timeout_s)
    return Mesh(
        axes,
        rank,
        shared,
        own,
        local_rank=local_rank,
        on_device=on_device,
        timeout_s=timeout_s,
    )


def no_store(name: str, ranks: Sequence[int]) -> ProcessGroup:
    raise ValueError(f"ranks {tuple(ranks)} need a store to create a group, got store=None")


class _Registered:
    """Holds the registered mesh, if there is one."""

    mesh: Mesh | DeviceMesh | None = None


class _OfThread(threading.local, _Registered):
    """The mesh registered by a thread other than the main one."""


_of_process, _of_thread = _Registered(), _OfThread()


def registered_mesh() -> Mesh | DeviceMesh | None:
    """The mesh registered by this thread, else by the main thread, else None."""
    return _of_thread.mesh or _of_process.mesh


def mesh_for_replicas() -> Mesh | DeviceMesh | None:
    """The registered mesh, for wrappers that replicate or shard over ``dp`` and ``shard`` by default.

    Raises:
        ValueError: another axis has several ranks, which would each train a model of their own. A registered
            view ``mesh[axis]`` is accepted as it is.
    """
    mesh = registered_mesh()
    if isinstance(mesh, DeviceMesh):
        require_used(mesh)
        return mesh
    if mesh is None or mesh.is_view:
        return mesh
    axes = mesh.axes
    unused = [name for name in axes.names if name not in DATA_AXES and axes.size(name) > 1]
    if unused:
        written = " * ".join(f"{name}({axes.size(name)})" for name in axes.names if axes.size(name) > 1)
        raise ValueError(
            f"{written} = {axes.world_size} ranks, but the batch is shared out along dp and shard alone: "
            f"nothing would use {' and '.join(unused)}, whose ranks would each train a model of their own. "
            "Call instep.init(dp=-1), or, if they have different parts of the model, pass process_group=mesh"
        )
    return mesh


def unregister(mesh: Mesh) -> None:
    """Unregister ``mesh`` and its views."""
    for place in (_of_process, _of_thread):
        if isinstance(place.mesh, Mesh) and place.mesh.along is mesh.along:
            place.mesh = None


class Get:
    """This rank's place in a mesh, by ``instep.get(what)`` anywhere in the program.

    Args:
        what: which of these is wanted. "grank": the global rank, an int. "rank", "ws": rank and number of
            ranks (world size), ints; along its axis where ``mesh`` is a view ``mesh["dp"]``, else in the
            world. "pg": the ``torch.distributed.ProcessGroup`` of the same ranks, for collectives of your
            own; None for a single rank. "lrank": the rank on this host, an int. "device": the
            ``torch.device`` of this rank.
        mesh: by default the registered one, which ``instep.init`` has made. It may be torch's
            ``DeviceMesh``; one of several dims is all its ranks.

    Returns:
        What was asked for.

    Raises:
        ValueError: ``what`` is none of these, or there is no mesh yet.

    Example:
        >>> mesh = instep.init()
        >>> instep.get("rank"), instep.get("ws"), instep.get("ws", mesh["dp"])
        (0, 1, 1)
        >>> instep.get("pg") is None  # of one rank
        True
        >>> print(instep.get("device"))
        cpu
    """

    __module__ = "instep"
    _names = ("grank", "rank", "ws", "pg", "lrank", "device")

    @overload
    def __call__(
        self, what: Literal["grank", "rank", "ws", "lrank"], mesh: Mesh | DeviceMesh | None = None
    ) -> int: ...
    @overload
    def __call__(self, what: Literal["pg"], mesh: Mesh | DeviceMesh | None = None) -> ProcessGroup | None: ...
    @overload
    def __call__(self, what: Literal["device"], mesh: Mesh | DeviceMesh | None = None) -> torch.device: ...
    def __call__(self, what: str, mesh: Mesh | DeviceMesh | None = None) -> Any:
        mesh = registered_mesh() if mesh is None else mesh
        if what not in self._names:
            raise ValueError(f"get({what!r}): expected one of {', '.join(self._names)}")
        if mesh is None:
            raise ValueError(f"get({what!r}): no mesh yet: call instep.init() first, or pass mesh=")
        if isinstance(mesh, DeviceMesh):
            return place_in(mesh, what)
        if what in ("lrank", "device"):  # which a process has before it has a rank
            return mesh.local_rank if what == "lrank" else mesh.device
        axis = mesh.whole
        answers = {"grank": mesh.rank, "rank": axis.rank, "ws": axis.size, "pg": axis.pg}
        return answers[what]

    def register_mesh(self, mesh: Mesh | DeviceMesh | None) -> None:
        """Make ``mesh`` the default of ``get`` and of every ``process_group=None``; None takes it back.

        Args:
            mesh: a mesh, a view of one (``mesh["dp"]``), or torch's ``DeviceMesh``, of which wrappers work
                over the one dim, or over the one with a name such as "dp".

        Raises:
            ValueError: it has several dims, and not one of them has such a name.
            TypeError: it is no mesh.

        Example:
            >>> instep.get.register_mesh(mesh["dp"])
            >>> instep.get("rank")  # along dp
            0
        """
        if isinstance(mesh, DeviceMesh):
            batch_group(mesh)
        elif mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(
                f"expected a mesh of instep.init() or a DeviceMesh, got a {type(mesh).__name__}: a process "
                "group is passed where it is used, process_group=..."
            )
        is_main = threading.current_thread() is threading.main_thread()
        (_of_process if is_main else _of_thread).mesh = mesh


get = Get()
