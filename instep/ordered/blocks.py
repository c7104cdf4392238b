"""Canonical blocks: the pieces of a parameter over which norms, hashes and scales are formed.

Norms of shards depend on where the shards begin. Norms of fixed blocks do not, as long as every shard
edge lies on a block edge; the same holds for hashes, and for the scale that numbers of a block share. A block
never spans two parameters. ``place`` lays parameters out so that any multiple of a block may be an edge:

    |block|block|block|block|block|block|
    |   weight 0  |b|   weight 1    |b|p|      p: padding

A parameter of a block or more begins on a block's edge; a smaller one begins on an aligned address, in what
is left of some block, and lies in one block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from instep.mesh.axes import round_up

BLOCK_ELEMENTS = 4096


def place(
    lengths: Sequence[int],
    granule: int,
    whole: Collection[int] = (),
    edges: int = 0,
    block: int = BLOCK_ELEMENTS,
) -> tuple[list[int], int]:
    """Where each parameter begins, and where there are none any more; those of ``whole`` lie between two
    multiples of ``edges``. Small ones begin at multiples of ``granule``, which divides a ``block``."""
    offsets, end = [], 0
    room, room_end = 0, 0  # what is left of one block, for small parameters
    for i, length in enumerate(lengths):
        begin = round_up(room, granule)
        if length >= block:
            if i in whole and end // edges != (end + length - 1) // edges:
                end = round_up(end, edges)
            begin, last = end, end + length
            end = round_up(last, block)
            if end - last > room_end - room:
                room, room_end = last, end
        elif length:
            if begin + length > room_end:
                begin, room_end = end, end + block
                end = room_end
            room = begin + length
        offsets.append(begin if length else 0)
    return offsets, end
