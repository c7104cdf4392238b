"""Hashes of a state that no rank has all of: each hashes the blocks that it answers for, and tells.

S bytes of state take S / W bytes of hashing per rank, then 32 bytes per block of 4096 elements travel, 0.2 %
of S. The result, on every rank, is what one rank with all of the state would have.

Who answers for what stands in a table, which is the same on all ranks and changes only with the parts, as
when the first step makes the moments. So the table is kept, and with each message comes a hash of what
its rank holds: if one is another than when the table was made, all make it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from instep.mesh.group import Group
from instep.ordered.hash import own_digests, whole_digests
from instep.ordered.parts import Part, Row, describe, table
from instep.ordered.sample import Sampled, own_samples, whole_samples

TABLE = "the table of who holds what of the state"
OPERATION = "the exchange of hashes of the state"
LIMIT_BYTES = 1 << 30
MARK_BYTES = 16


class Together:
    """The hashes of what the ranks of ``group`` hold; ``enter`` is told the phases that this rank enters."""

    def __init__(self, group: Group, enter: Callable[[str], None]) -> None:
        self._group, self._enter = group, enter
        self._marks: list[bytes] = []  # by rank, of what the rows were made from
        self._rows: list[Row] = []

    def digests(self, parts: Sequence[Part], step: int) -> tuple[str, dict[str, str]]:
        """``ordered.hash.state_digests`` of what all ranks' ``parts`` are parts of. Collective."""
        told = self._told(parts, lambda: own_digests(parts, self._rows, self._group.rank))
        return whole_digests(told, self._rows, step)

    def samples(self, parts: Sequence[Part], step: int, every: int) -> list[Sampled]:
        """``ordered.sample.sampled_blocks`` of what all ranks' ``parts`` are parts of. Collective."""
        told = self._told(parts, lambda: own_samples(parts, self._rows, self._group.rank, step, every))
        return whole_samples(told, self._rows, step, every)

    def _told(self, parts: Sequence[Part], own: Callable[[], bytes]) -> list[bytes]:
        """Each rank's ``own``, once all have the table of what they hold now."""
        described = describe(parts)
        mark = hashlib.sha256(described).digest()[:MARK_BYTES]
        known = self._marks[self._group.rank : self._group.rank + 1] == [mark]
        told = self._gather(mark + (own() if known else b""))
        marks = [data[:MARK_BYTES] for data in told]
        if marks == self._marks:
            return [data[MARK_BYTES:] for data in told]
        everyone = self._group.all_gather_bytes(described, TABLE)
        self._rows, self._marks = table(everyone, self._group.ranks), marks
        self._enter("hash")
        return self._gather(own())

    def _gather(self, mine: bytes) -> list[bytes]:
        self._enter("gather")
        return self._group.all_gather_bytes(mine, OPERATION, limit=LIMIT_BYTES)
