"""Weights whole just in time: a lane that fetches the slices of units, beside the computation.

    compute         |= unit 1 =|= unit 2 =|= unit 3 =
    communication   |~ 2 ~|     |~ 3 ~|    |~ 4 ~|         "parameter gather"

Where the ranks can read each other's memory (backend "shm"), a gather is W copies and no message; else the
slices are asked for (``wants``). Either way no other rank has to do anything at that moment, and values are
cast to the dtype of computation on the way. No rank may write to its slices while another may still gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.events import PARAMETER_GATHER, Recorder
from instep.mesh.device import Stream
from instep.mesh.group import Group
from instep.shard import transforms
from instep.shard.unit import Unit
from instep.shard.wants import Asked
from instep.work import Lane


class Source(Protocol):
    """Where slices come from: ``fetch`` fills ``parts[r]`` with rank r's slice of a unit, cast."""

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None: ...

    def close(self) -> None:
        """No more questions; the own slice is there for others that have some."""

    def abandon(self) -> None:
        """``close`` shall not wait for others."""


class Mapped:
    """Slices in memory that this rank can read: ``slices[r][i]`` is rank r's of unit i."""

    def __init__(self, slices: Sequence[Sequence[Tensor]]) -> None:
        self._slices = slices

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None:
        for part, own in zip(parts, self._slices, strict=True):
            part.copy_(own[number])

    def close(self) -> None:
        self._slices = []

    def abandon(self) -> None:
        pass


def find_source(group: Group, gather_group: Group, units: Sequence[Unit]) -> Source:
    """The way to the slices of ``units``, which lie in memory of ``group``. Collective.

    ``gather_group`` is over the same ranks, and is used if there have to be messages.
    """
    slices = [unit.slice for unit in units]
    if group.size == 1 or not slices:
        return Mapped([slices])
    shown = group.expose(slices, "the exchange of memory")  # all have come: the values are there
    if shown is None:
        return Asked(gather_group, slices)
    return Mapped([[x.view(u.dtype) for x, u in zip(row, units, strict=True)] for row in shown])


class Gathers:
    """Fetches units in the order in which they are wanted; of a world of one in the caller's thread."""

    def __init__(self, group: Group, source: Source, recorder: Recorder, device: torch.device) -> None:
        self.lane = Lane(f"instep gathers, rank {group.rank}", inline=group.size == 1)
        self._source, self._recorder, self._stream = source, recorder, Stream(device)

    def begin(self, units: Iterable[Unit]) -> None:
        """Gather those of ``units`` that are not here, and go on meanwhile."""
        for unit in units:
            if unit.is_free:
                transforms.require_outside(unit.name, unit.names)
                unit.open()
                try:
                    computed = self._stream.computed()
                    run = partial(self._fetch, unit, None, computed)
                    unit.work = self.lane.submit(f"the gather of unit {unit.name!r}", run)
                except BaseException:  # no thread could be started
                    self.lane.drain()
                    unit.free()
                    raise

    def need(self, units: Sequence[Unit]) -> None:
        """Gather those of ``units`` that are not here, and wait.

        Raises:
            PeerLost: a rank did not give its slice; ``units`` are free then.
        """
        self.begin(units)
        coming = [unit for unit in units if not unit.shown]
        if any(unit.work is not None and not unit.work.done() for unit in coming):
            with self._recorder.span(PARAMETER_GATHER, lane="host"):
                for unit in coming:
                    assert unit.work is not None
                    unit.work.finished.wait()
        for unit in coming:
            assert unit.work is not None
            if unit.work.error is not None:
                error = unit.work.error
                for failed in coming:
                    failed.free()
                raise error
        for unit in coming:
            unit.show()

    def whole(self, unit: Unit) -> list[Tensor]:
        """The master values of the parameters of ``unit``, in new memory."""
        flat = unit.whole()
        parts = list(flat.split(unit.layout.slice_length))
        work = self.lane.run(
            f"the masters of unit {unit.name!r}", partial(self._fetch, unit, parts, self._stream.computed())
        )
        work.wait()
        return unit.views_in(flat)

    def recover(self) -> None:
        """Go on after a gather that failed, unless a rank was lost."""
        if self.lane.failed is not None and not isinstance(self.lane.failed, PeerLost):
            self.lane.reset()

    def _fetch(self, unit: Unit, parts: Sequence[Tensor] | None, computed: object) -> None:
        """Fill ``parts``, by default the memory of the unit, of which no view outlives this."""
        parts = unit.parts() if parts is None else parts
        size = sum(part.numel() * part.itemsize for part in parts)
        recorder = self._recorder
        with (
            recorder.span(PARAMETER_GATHER, lane="communication", num_bytes=size, bucket=unit.number),
            self._stream.after(computed),  # type: ignore[arg-type]
            torch.no_grad(),
        ):
            self._source.fetch(unit.number, parts, f"the gather of unit {unit.name!r}")
