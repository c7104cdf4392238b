"""A sample of the state's blocks at every step, so that the whole is covered again and again for little.

Hashing the whole state takes longer than a small step. Instead the blocks of all entries are numbered
through, and after step t those are hashed whose number b has (b + t) % k == 0:

    k = 3      b   0  1  2  3  4  5  6
    step 3         x        x        x
    step 4               x        x
    step 5            x        x

After k steps each block has had its turn, so a flipped bit that stays is found within k steps, at 1/k of the
price. CRC-32 is enough for that: it sees every change within 32 bits in a row, so of one element, and takes a
third of the time of SHA-256; whoever wants to deceive has ``state_sha256`` to deceive as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from torch import Tensor

from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.hash import Entry, canonical_bytes

Sampled = tuple[str, int, str]
"""An entry's name, the number of a block in it, and its CRC-32 in hex."""


def sampled_blocks(entries: Iterable[Entry], step: int, every: int) -> list[Sampled]:
    """The blocks of ``entries`` whose turn it is after ``step``; each has one in ``every`` steps.

    Nothing is read or copied but these blocks (of a tensor that is not contiguous, the rows they lie in).
    """
    if every < 1:
        raise ValueError(f"expected every >= 1, got {every}: a block has its turn each so many steps")
    found, before = [], 0  # before: number of blocks in the entries so far
    for name, x in entries:
        num_blocks = -(-x.numel() // BLOCK_ELEMENTS)
        for block in range(-(step + before) % every, num_blocks, every):
            start = block * BLOCK_ELEMENTS
            piece = _piece(x.detach(), start, min(start + BLOCK_ELEMENTS, x.numel()))
            found.append((name, block, f"{zlib.crc32(canonical_bytes(piece)):08x}"))
        before += num_blocks
    return found


def _piece(x: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of ``x`` in logical order: a view if it is contiguous."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    row = x.numel() // len(x)
    first, last = start // row, (stop - 1) // row
    start, stop = start - first * row, stop - first * row
    return _piece(x[first], start, stop) if first == last else x[first : last + 1].reshape(-1)[start:stop]
