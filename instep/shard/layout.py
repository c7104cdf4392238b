"""Which part of which parameter each rank owns: arithmetic only.

The parameters of one dtype stand in one flat space, which is cut into W equal slices:

    |block|block|block|block|block|block|      a block: 4096 elements
    |   weight 0  |b|   weight 1    |b|p|      W = 2, p: padding
    |     slice 0     |     slice 1     |

A parameter of a block or more begins on a block's edge; a smaller one begins on an aligned address, in what
is left of some block, and lies in one block. So an edge of a slice, which is one of a block, never
cuts a canonical block of a parameter (``instep.reduce.blocks``), and what is formed per block, norms and
hashes, can be formed by the rank that owns it. All letters here count elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instep.mesh.axes import slice_length
from instep.reduce.blocks import BLOCK_ELEMENTS, place


@dataclass(frozen=True)
class LayoutPiece:
    """Elements ``first`` to ``last`` (exclusive) of a parameter, at ``offset`` of the flat space."""

    parameter: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameter i has ``lengths[i]`` elements and begins at ``offsets[i]``; rank r has the r-th slice."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    slice_length: int
    num_ranks: int

    @property
    def num_elements(self) -> int:
        """Of the flat space, with padding."""
        return self.slice_length * self.num_ranks

    def pieces(self, rank: int) -> list[LayoutPiece]:
        """What lies in the slice of ``rank``; a parameter without elements is in the first."""
        begin, end = rank * self.slice_length, (rank + 1) * self.slice_length
        found = []
        for i, (length, offset) in enumerate(zip(self.lengths, self.offsets, strict=True)):
            first, last = max(begin - offset, 0), min(end - offset, length)
            if first < last or (length == 0 and rank == 0):
                found.append(LayoutPiece(i, first, last, offset + first))
        return found

    def slices_with(self, parameter: int) -> list[int]:
        """The ranks whose slices have some of ``parameter``, by its number, as in ``pieces``."""
        first, length = self.offsets[parameter], self.lengths[parameter]
        if not length:
            return [0]
        return list(range(first // self.slice_length, (first + length - 1) // self.slice_length + 1))


LayoutRule = Callable[[Sequence[int], int, int], FlatLayout]
"""``cut`` or ``keep_whole``: of the lengths of parameters, the number of ranks and a granule."""


def cut(lengths: Sequence[int], num_ranks: int, granule: int) -> FlatLayout:
    """Parameters in their order, wherever the edges of the slices fall.

    Small ones begin at multiples of ``granule``, which divides a block. Padding is at most a block for every
    large parameter and for every rank, and for small ones as much again as they are and a granule each.
    """
    offsets, end = place(lengths, granule)
    length = slice_length(max(end, num_ranks), num_ranks, BLOCK_ELEMENTS)
    return FlatLayout(tuple(lengths), tuple(offsets), length, num_ranks)


def keep_whole(lengths: Sequence[int], num_ranks: int, granule: int) -> FlatLayout:
    """No parameter crosses an edge: the largest first, each to the rank that has least so far.

    A slice is as long as the longest: at most 4/3 of the shortest possible, before padding. Source: R. L.
    Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969), theorem 2.
    """
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads)) if lengths[i] else 0
        members[rank].append(i)
        loads[rank] += lengths[i]
    placed = [place([lengths[i] for i in sorted(own)], granule) for own in members]
    length = slice_length(max(end for _, end in placed), 1, BLOCK_ELEMENTS)
    offsets = [0] * len(lengths)
    for rank, own in enumerate(members):
        for i, offset in zip(sorted(own), placed[rank][0], strict=True):
            offsets[i] = rank * length + offset if lengths[i] else 0
    return FlatLayout(tuple(lengths), tuple(offsets), length, num_ranks)
