"""A pipe between two ranks: a ring of bytes in memory of the sender, and two counters.

    read                written          both only grow; their difference is what lies in the ring,
     |---- message ---->|                and either side waits for the other's
    [. . . . . . . . . . . . . . . . ]

A message is a head and its bytes. It may be longer than the ring: then the sender goes on as the receiver
makes room.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from instep.mesh.slices import round_up
from instep.shm import segment
from instep.shm.call import DTYPES
from instep.shm.room import LINE, PAGE, WORD
from instep.shm.segment import Mapping
from instep.shm.tensors import dtype_name

RING_BYTES = 1 << 20
# Sender and receiver work at the same time on different parts of the ring.
STEP_BYTES = RING_BYTES // 4
WRITTEN, READ = 0, LINE // WORD
_HEAD = struct.Struct("<3q")


@dataclass(frozen=True)
class Head:
    """What a message is: its tag, dtype and number of elements."""

    tag: int
    dtype: str
    count: int

    @staticmethod
    def of(x: Tensor, tag: int) -> Head:
        """That of a message with the contents of ``x``."""
        return Head(tag, dtype_name(x), x.numel())

    def fits(self, x: Tensor) -> bool:
        """Whether the message can be received into ``x``."""
        return (self.dtype, self.count) == (dtype_name(x), x.numel())

    def to_bytes(self) -> bytes:
        return _HEAD.pack(self.tag, DTYPES.index(self.dtype), self.count).ljust(LINE)

    @staticmethod
    def from_bytes(data: bytes) -> Head:
        """The head that ``to_bytes`` wrote."""
        tag, dtype, count = _HEAD.unpack(data[: _HEAD.size])
        return Head(tag, DTYPES[dtype], count)

    def __str__(self) -> str:
        return f"{self.count} {self.dtype} with tag {self.tag}"


Wait = Callable[[int, int], None]  # until word i of the channel is at least n


class Channel:
    """One end of the pipe in ``mapping``; ``wait(i, n)`` blocks until the other end's word i is >= n."""

    def __init__(self, mapping: Mapping, wait: Wait) -> None:
        self.words = mapping.words()
        self.fd, self.inode = mapping.fd, mapping.inode
        self._mapping = mapping
        self._ring = mapping.tensor(PAGE, RING_BYTES)
        self._wait = wait

    @staticmethod
    def create(wait: Wait) -> Channel:
        """The sender's end of a new pipe."""
        return Channel(segment.create(PAGE + RING_BYTES), wait)

    def write(self, data: Tensor) -> None:
        """Send bytes; the next ones begin on a line of their own."""
        written, start = self.words[WRITTEN], 0
        while start < data.numel():
            self._wait(READ, written + LINE - RING_BYTES)
            room = RING_BYTES - (written - self.words[READ])
            place = written % RING_BYTES
            step = min(STEP_BYTES, room, RING_BYTES - place, data.numel() - start)
            self._ring[place : place + step].copy_(data[start : start + step])
            start += step
            written += step if start < data.numel() else round_up(step, LINE)
            self.words.post(WRITTEN, written)

    def flush(self) -> None:
        """Wait until everything has been read."""
        self._wait(READ, self.words[WRITTEN])

    def read(self, data: Tensor) -> None:
        """Receive as many bytes as ``data`` has."""
        read, start = self.words[READ], 0
        while start < data.numel():
            self._wait(WRITTEN, read + 1)
            there = self.words[WRITTEN] - read
            place = read % RING_BYTES
            step = min(STEP_BYTES, there, RING_BYTES - place, data.numel() - start)
            data[start : start + step].copy_(self._ring[place : place + step])
            start += step
            read += step if start < data.numel() else round_up(step, LINE)
            self.words.post(READ, read)
