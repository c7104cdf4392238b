"""The arithmetic of a mesh: named axes over the ranks of a world, and equal slices of a flat tensor.

Ranks are numbered with the last axis fastest, so the ranks of a ``tp`` group are neighbours and those of
a ``pp`` group are far apart:

    Axes(pp=2, dp=2, tp=2)         tp 0  1          Axes(dp=2, shard=3)     shard 0  1  2
                          pp 0, dp 0:  0  1                              dp 0:    0  1  2     one host
                          pp 0, dp 1:  2  3                              dp 1:    3  4  5     another
                          pp 1, dp 0:  4  5
                          pp 1, dp 1:  6  7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

ORDER = ("pp", "dp", "shard", "ep", "tp")
DATA_AXES = ("dp", "shard")  # along them the batch is shared out
MODEL_AXES = ("ep", "tp")  # along them ranks compute the same micro-batches, each with a part of a layer


@dataclass(frozen=True)
class Axes:
    """``names[i]`` has ``sizes[i]`` ranks; the product is the world size."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[self._position(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where global ``rank`` stands on every axis."""
        place = {}
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank_at(self, **coordinates: int) -> int:
        """The global rank at ``coordinates`` (one for every axis)."""
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            rank = rank * size + coordinates[name]
        return rank

    def peers(self, axis: str, rank: int) -> tuple[int, ...]:
        """The global ranks that differ from ``rank`` on ``axis`` only, in order along it; ``rank`` is one."""
        here = self.coordinates(rank)
        return tuple(self.rank_at(**{**here, axis: i}) for i in range(self.size(axis)))

    def peers_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` only, in ascending order."""
        here = self.coordinates(rank)
        places = product(*(range(self.size(name)) for name in axes))
        return tuple(self.rank_at(**here | dict(zip(axes, place, strict=True))) for place in places)

    def partition(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of ``axis``: every rank is in one of them."""
        return sorted({self.peers(axis, rank) for rank in range(self.world_size)})

    def _position(self, axis: str) -> int:
        if axis not in self.names:
            raise ValueError(f"no axis {axis!r} in this mesh: expected one of {', '.join(self.names)}")
        return self.names.index(axis)


def resolve(world_size: int, *, dp: int = -1, shard: int = 1, pp: int = 1, tp: int = 1, ep: int = 1) -> Axes:
    """Axes of a world of ``world_size`` ranks; one of the sizes may be -1, "what is left".

    Raises:
        ValueError: the sizes do not multiply to the world size; the message shows every factor.
    """
    sizes = {"pp": pp, "dp": dp, "shard": shard, "ep": ep, "tp": tp}
    usual = ("dp", "pp", "tp")
    shown = [name for name in ("dp", "shard", "pp", "tp", "ep") if name in usual or sizes[name] != 1]
    written = " * ".join(f"{name}({sizes[name]})" for name in shown)
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}: expected a positive number of ranks, or -1 for what is left")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{written}: at most one axis can be -1, got {' and '.join(open_axes)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if world_size % fixed:
            raise ValueError(
                f"{written}: the fixed axes need a multiple of {fixed} ranks, but the world has {world_size}"
            )
        sizes[open_axes[0]] = world_size // fixed
    elif fixed != world_size:
        raise ValueError(
            f"{written} = {fixed}, but the world has {world_size} ranks: pass dp=-1 to let instep choose"
        )
    return Axes(ORDER, tuple(sizes[name] for name in ORDER))


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


def slice_length(num_elements: int, parts: int, multiple: int) -> int:
    """Length of each of ``parts`` equal slices that hold ``num_elements``, a multiple of ``multiple``.

    The flat tensor is padded to ``parts * slice_length`` so that every slice has the same length and
    starts on an aligned address.
    """
    return round_up(max(-(-num_elements // parts), 1), multiple)
