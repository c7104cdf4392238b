"""The ranks of a run as a grid, with the process groups of every axis.

Backends pair operations by the order of their issue alone, so a collective that a user starts between two of
ours on the same group would exchange numbers with it, and so would two wrappers in one backward. Every
exchange of instep's therefore runs on a group that nobody else has: a duplicate of the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from instep.events import Recorder
from instep.mesh import device
from instep.mesh.axes import Axes, resolve
from instep.mesh.board import Board
from instep.mesh.group import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

MakeGroup = Callable[[str, Sequence[int]], "ProcessGroup"]
# A backend's own limit has to be later than ours, which names the rank, but not much: a process cannot end
# while gloo still waits.
BACKEND_PATIENCE = 1.2


class Axis:
    """The ranks that differ from this one along one axis (or all of them, for the whole world).

    ``pg`` is the user's process group, None where there is one rank; ``group`` wraps it for the thread
    that runs the training loop. ``duplicate()`` makes a group of one's own over the same ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        make: MakeGroup,
        timeout_s: float,
        store: Store | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self._make = make
        self._store = store
        self._num_duplicates = 0
        self.pg = None if self.size == 1 else make(name, self.ranks)
        self.group = self._wrap(self.pg, name)

    @cached_property
    def private(self) -> Group:
        """A duplicate for instep's own use in the training loop's thread."""
        return self.duplicate()

    def duplicate(self) -> Group:
        """A new group over the same ranks, for one user in one thread. Collective over the axis."""
        self._num_duplicates += 1
        name = f"{self.name}/instep/{self._num_duplicates}"
        return self._wrap(None if self.size == 1 else self._make(name, self.ranks), name)

    def _wrap(self, pg: ProcessGroup | None, name: str) -> Group:
        board = Board(self._store, f"{name}/{self.ranks[0]}")
        return Group(pg, self.ranks, self.ranks[self.rank], self.timeout_s, board)


class Mesh:
    """Named axes over the ranks of a world, with this rank's place on each.

    ``mesh["dp"]`` is the same mesh seen along one axis: what ``process_group=`` and ``get(..., mesh=)``
    take. ``recorder`` receives the spans of whoever was handed this mesh. ``close()`` gives back the
    groups that the mesh made, then does what is in ``on_close``, the last first; groups that were there
    before stay.
    """

    def __init__(
        self,
        axes: Axes,
        rank: int,
        make: MakeGroup,
        *,
        store: Store | None = None,
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
        self._made: list[ProcessGroup] = []
        self.on_close: list[Callable[[], None]] = []

        def make_and_keep(name: str, ranks: Sequence[int]) -> ProcessGroup:
            pg = make(name, ranks)
            self._made.append(pg)
            return pg

        self.along = {
            name: Axis(name, axes.peers(name, rank), rank, make_and_keep, timeout_s, store)
            for name in axes.names
        }
        busy = [axis for axis in self.along.values() if axis.size == axes.world_size]
        everyone = range(axes.world_size)
        self.world = busy[-1] if busy else Axis("world", everyone, rank, make_and_keep, timeout_s, store)

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
        while self._made:
            destroy(self._made.pop())
        while self.on_close:
            self.on_close.pop()()


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
) -> Mesh:
    """A mesh over an existing world; ``make_group`` makes the groups where torch's default group does not.

    ``store`` is where the ranks met; those that wait long leave word there.
    """
    make = make_group or _new_group(timeout_s)
    return Mesh(
        resolve(world_size, dp=dp, pp=pp, tp=tp),
        rank,
        make,
        store=store,
        local_rank=local_rank,
        on_device=on_device,
        timeout_s=timeout_s,
    )


def destroy(pg: ProcessGroup | None) -> None:
    """Destroy a group that we made, unless it is gone already."""
    if pg is not None and dist.is_initialized() and pg in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(pg)


def _new_group(timeout_s: float) -> MakeGroup:
    def make(name: str, ranks: Sequence[int]) -> ProcessGroup:
        pg = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s * BACKEND_PATIENCE),
            backend=device.complete(dist.get_backend()),
            use_local_synchronization=True,
            group_desc=f"instep {name}",
        )
        assert pg is not None
        return pg

    return make
