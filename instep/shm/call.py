"""What a rank is about to do, as it tells the others before anything is read or written.

Two ranks that come to one place with different operations would otherwise add apples to pears, or wait for
each other for ever. The words of a call lie beside the sequence number that says "I am here", so comparing
them costs no message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from instep.mesh.hang_report import Problem

OPERATIONS = (
    "all_gather",
    "all_reduce",
    "all_reduce_sparse",
    "all_to_all",
    "barrier",
    "broadcast",
    "map_all",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
DTYPES = (
    "",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "uint16",
    "uint32",
    "uint64",
)
CALL_BYTES = 40
LOCATION_BYTES = 32
SLOT_BYTES = CALL_BYTES + LOCATION_BYTES
_WORDS = struct.Struct("<5q")
_LOCATION = struct.Struct("<4q")


@dataclass(frozen=True)
class Call:
    """An operation with everything in which the ranks must agree; ``count`` is in elements per rank."""

    operation: str
    dtype: str = ""
    count: int = 0
    reduction: str = ""
    root: int = -1

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(operation: str, dtype: str, count: int, reduction: str, root: int) -> Call:
        """The call of these words: a training makes the same ones again and again."""
        return Call(operation, dtype, count, reduction, root)

    @cached_property
    def announcement(self) -> bytes:
        """What a rank with its tensor in private memory writes into its slot."""
        return self.to_bytes() + NOWHERE.to_bytes()

    def to_bytes(self) -> bytes:
        """``CALL_BYTES`` bytes, equal exactly where the calls are."""
        return _WORDS.pack(
            OPERATIONS.index(self.operation),
            DTYPES.index(self.dtype),
            self.count,
            REDUCTIONS.index(self.reduction),
            self.root,
        )

    @staticmethod
    def from_bytes(data: bytes) -> Call:
        """The call that ``to_bytes`` wrote."""
        operation, dtype, count, reduction, root = _WORDS.unpack(data[:CALL_BYTES])
        return Call(OPERATIONS[operation], DTYPES[dtype], count, REDUCTIONS[reduction], root)

    def __str__(self) -> str:
        how = f" ({self.reduction})" if self.reduction else ""
        what = f" of {self.count} {self.dtype}" if self.dtype else ""
        root = f" with root {self.root}" if self.root >= 0 else ""
        return f"{self.operation}{how}{what}{root}"


class Location(NamedTuple):
    """Where a tensor lies in memory that its rank shares: descriptor, inode, first byte, number of bytes."""

    fd: int
    inode: int
    offset: int
    nbytes: int

    def to_bytes(self) -> bytes:
        return _LOCATION.pack(*self)

    @staticmethod
    def from_bytes(data: bytes) -> Location:
        """The location that ``to_bytes`` wrote."""
        return Location(*_LOCATION.unpack(data[:LOCATION_BYTES]))


NOWHERE = Location(-1, 0, 0, 0)  # private memory


def disagreement(calls: Sequence[Call], ranks: Sequence[int]) -> Problem:
    """What to tell about unequal ``calls``; ``calls[i]`` is that of global rank ``ranks[i]``."""
    sides: dict[Call, list[int]] = {}
    for call, rank in zip(calls, ranks, strict=True):
        sides.setdefault(call, []).append(rank)
    told = "; ".join(f"{_plural(members)} {call}" for call, members in sides.items())
    return Problem(
        f"the ranks came to the same place with different operations: {told}. Nothing was written",
        told,
        "All ranks of a group must call the same operations in the same order, with equal shapes and dtypes",
    )


def _plural(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
