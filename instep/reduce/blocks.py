"""Canonical blocks: the pieces of a parameter that norms, hashes and scales are computed over.

Norms of shards depend on the edges of the shards. Norms of fixed blocks do not, if every shard edge is a
block edge; likewise hashes, and the scale that the numbers of a block share. A block never spans two
parameters. ``place`` lays parameters out so that every multiple of a block may be a shard edge:

    |block|block|block|block|block|block|
    |   weight 0  |b|   weight 1    |b|p|      p: padding

A parameter of a block or more starts at a block edge. A smaller one starts at an aligned address in the rest
of some block, and does not cross its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.mesh.axes import round_up

BLOCK_ELEMENTS = 4096


def place(lengths: Sequence[int], granule: int, block: int = BLOCK_ELEMENTS) -> tuple[list[int], int]:
    """The offset of each parameter, and the end of the last one.

    Small parameters start at multiples of ``granule``, which divides ``block``.
    """
    offsets, end = [], 0
    room, room_end = 0, 0  # the free rest of one block, for small parameters
    for length in lengths:
        begin = round_up(room, granule)
        if length >= block:
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
