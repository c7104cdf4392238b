"""Which ranks have what of a sharded module: a row has one copy of it in slices, a column has the same slice.

    mesh of dp(2) * shard(3)        slice 0   slice 1   slice 2
                        replica 0:  rank 0    rank 1    rank 2     a row: one host, which gathers within
                        replica 1:  rank 3    rank 4    rank 5     another row
                                       a column: the same slice, on several hosts

Weights and each micro-batch's gradients travel within a row, where memory or the network is fast; only the
sum of a slice goes from row to row, once per step. Without ``shard`` there is one row, which is all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.events import Recorder
from instep.mesh.current import registered
from instep.mesh.find import find_ranks
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ranks:
    """Groups of one's own over them. ``weights`` are those of ``row`` again, for another thread.

    ``column`` is None where there is one row.
    """

    whole: Group
    row: Group
    weights: Group
    column: Group | None

    @property
    def num_replicas(self) -> int:
        return 1 if self.column is None else self.column.size

    @property
    def replica(self) -> int:
        """Number of this rank's row."""
        return 0 if self.column is None else self.column.rank

    @property
    def groups(self) -> list[Group]:
        """All of them, each once."""
        found = [self.weights, self.row, self.whole, self.column]
        return [group for group in dict.fromkeys(found) if group is not None]

    def close(self) -> None:
        """Give all groups back."""
        for group in self.groups:
            group.close()


def row_of(process_group: Mesh | ProcessGroup | None) -> Mesh | ProcessGroup | None:
    """What to give to ``find_ranks`` for the ranks of this one's row: ``mesh["shard"]``, if there is one."""
    mesh = _with_rows(process_group)
    return process_group if mesh is None else mesh["shard"]


def num_rows(process_group: Mesh | ProcessGroup | None) -> int:
    """How many rows ``process_group`` is, or is one of."""
    mesh = registered() if process_group is None else process_group
    if not isinstance(mesh, Mesh) or mesh.axes.size("shard") == 1:
        return 1
    return 1 if mesh.is_view and mesh.whole is not mesh.along["shard"] else mesh.axes.size("dp")


def find(
    process_group: Mesh | ProcessGroup | None, timeout_s: float | None, *, what: str
) -> tuple[Ranks, Recorder]:
    """New groups over the ranks that ``process_group`` means, and where to record. Collective.

    Raises:
        PeerLost, ValueError: as ``find_ranks``.
    """
    mesh = _with_rows(process_group)
    row, recorder = find_ranks(row_of(process_group), timeout_s, what=what)
    weights, _ = find_ranks(row_of(process_group), timeout_s, what=what)
    if mesh is None or mesh.axes.size("dp") == 1:
        return Ranks(row, row, weights, None), recorder
    column, _ = find_ranks(mesh["dp"], timeout_s, what=what)
    return Ranks(mesh.data.duplicate(), row, weights, column), recorder


def _with_rows(process_group: Mesh | ProcessGroup | None) -> Mesh | None:
    """The mesh that is meant, if it has a ``shard`` axis."""
    mesh = registered() if process_group is None else process_group
    if isinstance(mesh, Mesh) and not mesh.is_view and mesh.axes.size("shard") > 1:
        return mesh
    return None
