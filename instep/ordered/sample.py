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
from collections.abc import Iterable, Iterator, Sequence

from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.hash import Entry, canonical_bytes
from instep.ordered.parts import Part, Row, own_runs

CRC_DIGITS = 8  # hexadecimal

Sampled = tuple[str, int, str]
"""An entry's name, the number of a block in it, and its CRC-32 in hex."""


def sampled_blocks(entries: Iterable[Entry], step: int, every: int) -> list[Sampled]:
    """The blocks of ``entries`` whose turn it is after ``step``; each has one in ``every`` steps.

    Nothing is read or copied but these blocks (of a tensor that is not contiguous, the rows they lie in).
    """
    entries = list(entries)
    sizes = [(name, -(-x.numel() // BLOCK_ELEMENTS)) for name, x in entries]
    parts = {name: Part.whole(name, x) for name, x in entries}
    return [(name, block, _crc(parts[name], block)) for name, block in _turns(sizes, step, every)]


def own_samples(parts: Sequence[Part], rows: Sequence[Row], rank: int, step: int, every: int) -> bytes:
    """CRC-32 of the blocks whose turn it is and for which ``rank``, which holds ``parts``, answers."""
    turns: dict[str, list[int]] = {}
    for name, block in _turns(_sizes(rows), step, every):
        turns.setdefault(name, []).append(block)
    found = [
        _crc(part, block)
        for row, run, part in own_runs(parts, rows, rank)
        for block in turns.get(row.name, ())
        if run.first <= block < run.last
    ]
    return "".join(found).encode()


def whole_samples(everyone: Sequence[bytes], rows: Sequence[Row], step: int, every: int) -> list[Sampled]:
    """``sampled_blocks`` of the state of which each rank has told its ``own_samples``."""
    runs = {row.name: row.runs for row in rows}
    told = [iter(range(0, len(data), CRC_DIGITS)) for data in everyone]
    found = []
    for name, block in _turns(_sizes(rows), step, every):
        rank = next(run.rank for run in runs[name] if run.first <= block < run.last)
        at = next(told[rank])
        found.append((name, block, everyone[rank][at : at + CRC_DIGITS].decode()))
    return found


def _turns(sizes: Iterable[tuple[str, int]], step: int, every: int) -> Iterator[tuple[str, int]]:
    """Name and number of each block whose turn it is; ``sizes``: the entries' names and numbers of blocks."""
    if every < 1:
        raise ValueError(f"expected every >= 1, got {every}: a block has its turn each so many steps")
    before = 0  # number of blocks in the entries so far
    for name, num_blocks in sizes:
        for block in range(-(step + before) % every, num_blocks, every):
            yield name, block
        before += num_blocks


def _sizes(rows: Iterable[Row]) -> Iterator[tuple[str, int]]:
    return ((row.name, row.num_blocks) for row in rows)


def _crc(part: Part, block: int) -> str:
    return f"{zlib.crc32(canonical_bytes(part.blocks(block, block + 1))):08x}"
