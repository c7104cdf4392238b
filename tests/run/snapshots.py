"""A supervisor for ranks that are threads: it holds their snapshots for the next generation."""

from __future__ import annotations

import os
from typing import Any, cast

from instep.elastic.snapshot import Snapshot, SnapshotHandle
from instep.launch.memory_file import MemoryFile
from instep.run.recovery import Snapshots


class Supervisor:
    """Takes what ranks, which are threads, hand over, and holds it."""

    def __init__(self, generation: int = 1) -> None:
        self.generation = generation
        self.kept: dict[tuple[int, int], SnapshotHandle] = {}
        self._copies: list[Snapshot] = []

    def hand_over(
        self, copy: Snapshot, rank: int = 0, num_ranks: int = 1, generation: int | None = None
    ) -> None:
        self._copies.append(copy)
        place = MemoryFile(os.getpid(), copy.mapping.fd, copy.mapping.inode)
        begun = self.generation if generation is None else generation
        self.kept[begun, rank] = SnapshotHandle(place, begun, rank, num_ranks)

    @property
    def all(self) -> list[SnapshotHandle]:
        return [kept for _, kept in sorted(self.kept.items())]


def snapshots_of(supervisor: Supervisor) -> Snapshots:
    """What a rank of the next generation knows of them."""
    snapshots = Snapshots(cast(Any, supervisor))
    snapshots.take_over(supervisor.all)
    return snapshots
