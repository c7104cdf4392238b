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

    def part(self, parameter: int, rank: int) -> tuple[int, int]:
        """Elements (first, last) of ``parameter``, by its number, in the slice of ``rank``."""
        begin = rank * self.slice_length - self.offsets[parameter]
        first, last = max(begin, 0), min(begin + self.slice_length, self.lengths[parameter])
        return first, max(first, last)

    def pieces(self, rank: int) -> list[LayoutPiece]:
        """What lies in the slice of ``rank``; a parameter without elements is in the first."""
        found = []
        for i, (length, offset) in enumerate(zip(self.lengths, self.offsets, strict=True)):
            first, last = self.part(i, rank)
            if first < last or (length == 0 and rank == 0):
                found.append(LayoutPiece(i, first, last, offset + first))
        return found

    def slices_with(self, parameter: int) -> list[int]:
        """The ranks whose slices have some of ``parameter``, by its number, as in ``pieces``."""
        parts = [self.part(parameter, rank) for rank in range(self.num_ranks)]
        return [rank for rank, (first, last) in enumerate(parts) if first < last] or [0]


Cost = Callable[[Sequence[int]], int]
"""The work of stepping a parameter of this shape, in any unit; 0 for one without elements."""


def newton_schulz(shape: Sequence[int]) -> int:
    """Multiplications of an iteration on X of (m, n), m <= n: X X^T, its square, and a product with X.

    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    m, n = min(shape, default=1), max(shape, default=1)
    return m * m * (2 * n + m)


def cut(lengths: Sequence[int], num_ranks: int, granule: int) -> FlatLayout:
    """Parameters in their order, wherever the edges of the slices fall.

    Small ones begin at multiples of ``granule``, which divides a block. Padding is at most a block for every
    large parameter and for every rank, and for small ones as much again as they are and a granule each.
    """
    offsets, end = place(lengths, granule)
    length = slice_length(max(end, num_ranks), num_ranks, BLOCK_ELEMENTS)
    return FlatLayout(tuple(lengths), tuple(offsets), length, num_ranks)


def owners(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that steps each parameter: the most costly first, each to the rank with the least work so far.

    The rank with the most work has at most 4/3 of what the best division would give it. Source: R. L. Graham,
    "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969), theorem 2.
    """
    found, loads = [0] * len(costs), [0] * num_ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[i] = loads.index(min(loads)) if costs[i] else 0
        loads[found[i]] += costs[i]
    return found


def keep_whole(lengths: Sequence[int], num_ranks: int, granule: int, costs: Sequence[int]) -> FlatLayout:
    """No parameter crosses an edge: each is in the slice of its owner, by ``costs`` of stepping them.

    A slice is as long as the longest.
    """
    owned_by = owners(costs, num_ranks)
    members = [[i for i, owner in enumerate(owned_by) if owner == rank] for rank in range(num_ranks)]
    placed = [place([lengths[i] for i in own], granule) for own in members]
    length = slice_length(max(end for _, end in placed), 1, BLOCK_ELEMENTS)
    offsets = [0] * len(lengths)
    for rank, own in enumerate(members):
        for i, offset in zip(own, placed[rank][0], strict=True):
            offsets[i] = rank * length + offset if lengths[i] else 0
    return FlatLayout(tuple(lengths), tuple(offsets), length, num_ranks)
