"""The last records of fixed size, in a ring of memory that may be a file, which survives a killed process.

A write is one store into mapped memory, less than a microsecond: nothing is flushed, no thread runs, and
after SIGKILL the kernel still has every record that was written.

    | head: magic, JSON | names: length, text | length, text | ... | record | record | record | ...

Records are numbered from 1 and number n is stored at (n - 1) mod capacity, so a reader knows which are the
newest, and that a place with another number was being overwritten.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.regular_files import open_or_create, open_regular

MAGIC = b"instep\x00\x01"
HEAD_BYTES, NAMES_BYTES = 4096, 12288
FIRST = HEAD_BYTES + NAMES_BYTES
OTHER = "other"  # the name of every further name when the names' part is full
# "stages": the stage plus one, so that the zero of older files means none.
FIELDS = ("number", "start_ns", "end_ns", "bytes", "step", "leaf", "bucket", "peer", "name", "lane", "stages")
RECORD = struct.Struct("<4q4i2Hi")
_LENGTH = struct.Struct("<H")

Record = tuple[int, int, int, int, int, int, int, int, int, int, int]  # FIELDS


class RingBuffer:
    """The last ``capacity`` records, in file ``path`` or in private memory.

    An existing file is continued if its ``head`` has the same "boot" and capacity, else replaced. ``head``
    is for readers. Names and lanes are numbered in order of first use.

    Raises:
        OSError: the file cannot be created, or the disk has no room for all of it.
        ValueError: as JSON, ``head`` is longer than ``HEAD_BYTES``.
    """

    def __init__(
        self, capacity: int, path: Path | None = None, head: Mapping[str, Any] | None = None
    ) -> None:
        self.capacity, self.newest = capacity, 0
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._names_end = HEAD_BYTES
        self._kinds: dict[tuple[str, str], tuple[int, int]] = {}  # numbers of a name and a lane
        head = {**(head or {}), "capacity": capacity}
        self._memory: bytearray | mmap.mmap = bytearray(FIRST + capacity * RECORD.size)
        if path is not None:
            self._open(path, head)
        self._numbers = itertools.count(self.newest + 1)
        self._number(OTHER)
        data = MAGIC + json.dumps(head).encode()
        if len(data) > HEAD_BYTES:
            raise ValueError(f"the head of a ring: expected at most {HEAD_BYTES} bytes, got {len(data)}")
        self._memory[:HEAD_BYTES] = data.ljust(HEAD_BYTES)

    def put(
        self,
        name: str,
        lane: str,
        start_ns: int,
        end_ns: int,
        size: int,
        step: int,
        leaf: int,
        bucket: int,
        peer: int,
        stage: int = -1,
    ) -> None:
        """Overwrite the oldest record."""
        kind = self._kinds.get((name, lane))
        if kind is None:
            kind = self._kinds[name, lane] = self._number(name), self._number(lane)
        number, (named, on) = next(self._numbers), kind
        at = FIRST + (number - 1) % self.capacity * RECORD.size
        RECORD.pack_into(
            self._memory, at, number, start_ns, end_ns, size, step, leaf, bucket, peer, named, on, stage + 1
        )
        if number > self.newest:  # of two threads the second may get here first
            self.newest = number

    def since(self, count: int) -> list[Record]:
        """The records after number ``count`` that are kept, oldest first; other threads may keep writing."""
        newest = self.newest
        first = max(count, newest - self.capacity)
        begin, end = first % self.capacity, newest % self.capacity
        if newest <= first:
            return []
        rows = (
            self._rows(begin, end) if begin < end else self._rows(begin, self.capacity) + self._rows(0, end)
        )
        return [row for number, row in enumerate(rows, first + 1) if row[0] == number]

    def _rows(self, begin: int, end: int) -> list[Record]:
        size = RECORD.size
        return [*RECORD.iter_unpack(self._memory[FIRST + begin * size : FIRST + end * size])]

    @property
    def names(self) -> list[str]:
        """Names by number."""
        return list(self._names)

    def _number(self, name: str) -> int:
        with self._lock:
            text = name.encode(errors="replace")[:255]
            end = self._names_end + _LENGTH.size + len(text)
            if name in self._names:
                return self._names[name]
            if not text or end + _LENGTH.size > FIRST:  # an empty text marks the end of the names
                return self._names[OTHER]
            self._memory[self._names_end : end] = _LENGTH.pack(len(text)) + text
            self._names_end = end
            self._names[name] = len(self._names)
            return self._names[name]

    def _open(self, path: Path, head: Mapping[str, Any]) -> None:
        old, num_bytes = read_head(path), len(self._memory)
        if old is not None and any(old[0].get(key) != head.get(key) for key in ("boot", "capacity")):
            old = None
        fd = open_or_create(path, os.O_RDWR | (os.O_TRUNC if old is None else 0), 0o644)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # not only a larger size: no SIGBUS on a full disk
            self._memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        if old is not None:
            self._names = {name: number for number, name in enumerate(old[1])}
            self._names_end += sum(_LENGTH.size + len(name.encode()) for name in old[1])
            self.newest = max(row[0] for row in self._rows(0, self.capacity))


def read_head(path: Path) -> tuple[dict[str, Any], list[str]] | None:
    """The head and the names in file ``path``; None if it is no ring."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(FIRST)
        if len(data) < FIRST or not data.startswith(MAGIC):
            return None
        head = json.loads(data[len(MAGIC) : HEAD_BYTES])
    except (OSError, ValueError, RecursionError):  # RecursionError: JSON nested too deep
        return None
    names, at = [], HEAD_BYTES
    while at + _LENGTH.size <= FIRST and (length := _LENGTH.unpack_from(data, at)[0]):
        at += _LENGTH.size
        names.append(data[at : at + length].decode(errors="replace"))
        at += length
    return (head, names) if isinstance(head, dict) else None
