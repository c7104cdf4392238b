"""The call that a rank announces to the others before any data is read or written.

Two ranks that call different operations would otherwise add unrelated numbers, or wait for each other until
the deadline. The announcement lies beside the round counter in shared memory, so comparing costs no message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from instep.net.hang_report import Problem, StatusRow, different_calls

CALL_BYTES = 96
LOCATION = struct.Struct("<4q")
SLOT_BYTES = CALL_BYTES + LOCATION.size


class Location(NamedTuple):
    """Where a tensor lies in memory that its rank shares: descriptor, inode, first byte, number of bytes."""

    fd: int
    inode: int
    offset: int
    nbytes: int


NOWHERE = Location(-1, 0, 0, 0)  # private memory


@lru_cache(maxsize=1024)
def describe_call(
    operation: str, dtype: object = "", count: int = 0, reduction: str = "", root: int = -1
) -> str:
    """A call in words that are equal exactly where calls agree; ``count`` is in elements per rank."""
    how = f" ({reduction})" if reduction else ""
    of = f" of {count} {str(dtype).removeprefix('torch.')}" if dtype else ""
    return f"{operation}{how}{of}" + (f" with root {root}" if root >= 0 else "")


@lru_cache(maxsize=1024)
def announcement(call: str, location: Location = NOWHERE) -> bytes:
    """What a rank writes into its slot: ``call``, and where its tensor lies."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES) + LOCATION.pack(*location)


def disagreement(slots: Sequence[bytes], ranks: Sequence[int]) -> Problem | None:
    """Why the calls in ``slots`` do not match, None if they do; ``ranks`` are global ranks."""
    if len({slot[:CALL_BYTES] for slot in slots}) == 1:
        return None
    calls = [slot[:CALL_BYTES].decode().strip() for slot in slots]
    return different_calls([StatusRow(rank, what=call) for rank, call in zip(ranks, calls, strict=True)])
