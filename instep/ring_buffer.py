"""The last records of fixed size, in a ring of memory that may be a file, which outlives a killed process.

A write is one store into mapped memory, less than a microsecond: nothing is flushed, no thread runs, and
after SIGKILL the kernel still has every record that was written.

    | head: magic, JSON | names: length, text | length, text | ... | record | record | record | ...

Records are numbered from 1 and number n lies in place (n - 1) mod capacity, so a reader knows which are
the newest, and that a place which holds another number was being overwritten.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.regular_files import open_or_create, open_regular

MAGIC = b"instep\x00\x01"
HEAD_BYTES, NAMES_BYTES = 4096, 12288
FIRST = HEAD_BYTES + NAMES_BYTES
OTHER = "other"  # every name after the names' part is full
# "stages": one more than the stage, so that the zero of files which know of none says that there is none.
FIELDS = ("number", "start_ns", "end_ns", "bytes", "step", "leaf", "bucket", "peer", "name", "lane", "stages")
RECORD = struct.Struct("<4q4i2Hi")
_WRITTEN = struct.Struct("<4q4iIi")  # the same bytes, with name and lane as one number
_LENGTH = struct.Struct("<H")

Record = tuple[int, int, int, int, int, int, int, int, int, int, int]  # FIELDS


class RingBuffer:
    """The last ``capacity`` records; in ``path``, which is made, or gone on with if its ``head`` has the same
    "boot" and capacity, else in private memory.

    ``head`` is told to readers; as JSON it has room in ``HEAD_BYTES``. ``names`` and lanes are numbered in
    the order in which they first come.

    Raises:
        OSError: the file cannot be made, or there is no room for all of it.
    """

    def __init__(
        self, capacity: int, path: Path | None = None, head: Mapping[str, Any] | None = None
    ) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._kinds: dict[tuple[str, str], int] = {}  # the numbers of a name and a lane, as one
        self._names_end = HEAD_BYTES
        num_bytes = FIRST + capacity * RECORD.size
        head = {**(head or {}), "capacity": capacity}
        begun = 0
        if path is None:
            self._memory: bytearray | mmap.mmap = bytearray(num_bytes)
        else:
            begun = self._open(path, head, num_bytes)
        self._numbers = itertools.count(begun + 1)
        self.newest = begun
        self.number(OTHER)
        self._describe(head)

    def _describe(self, head: Mapping[str, Any]) -> None:
        text = json.dumps(head).encode()
        if len(text) > HEAD_BYTES - len(MAGIC):
            raise ValueError(
                f"the head of a ring: expected at most {HEAD_BYTES - len(MAGIC)} bytes, got {len(text)}"
            )
        self._memory[:HEAD_BYTES] = MAGIC + text.ljust(HEAD_BYTES - len(MAGIC))

    def number(self, name: str) -> int:
        """The number that stands for ``name`` in records."""
        found = self._names.get(name)
        return found if found is not None else self._add(name)

    def put(
        self,
        name: str,
        lane: str,
        start_ns: int,
        end_ns: int,
        num_bytes: int,
        step: int,
        leaf: int,
        bucket: int,
        peer: int,
        stage: int = -1,
    ) -> None:
        """Write one record over the oldest."""
        kind = self._kinds.get((name, lane))
        if kind is None:
            kind = self._kinds[name, lane] = self.number(name) | self.number(lane) << 16
        number = next(self._numbers)
        _WRITTEN.pack_into(
            self._memory,
            FIRST + (number - 1) % self.capacity * RECORD.size,
            number,
            start_ns,
            end_ns,
            num_bytes,
            step,
            leaf,
            bucket,
            peer,
            kind,
            stage + 1,
        )
        if number > self.newest:  # of two threads the second may come first
            self.newest = number

    def since(self, count: int) -> list[Record]:
        """The records after number ``count``, as far as they are kept, from the oldest on; other threads may
        go on writing."""
        newest = self.newest
        first = max(count, newest - self.capacity)
        begin, end = first % self.capacity, newest % self.capacity
        if newest <= first:
            return []
        rows = self._rows(begin, end) if begin < end else self._rows(begin) + self._rows(0, end)
        return [row for number, row in enumerate(rows, first + 1) if row[0] == number]

    def _rows(self, begin: int, end: int | None = None) -> list[Record]:
        """What is in the places from ``begin`` to ``end`` (exclusive), by default the last."""
        end = self.capacity if end is None else end
        size = RECORD.size
        return [*RECORD.iter_unpack(self._memory[FIRST + begin * size : FIRST + end * size])]

    def backwards(self) -> Iterator[Record]:
        """The records from the newest to the oldest; other threads may go on writing."""
        newest = self.newest
        for number in range(newest, max(newest - self.capacity, 0), -1):
            record = RECORD.unpack_from(self._memory, FIRST + (number - 1) % self.capacity * RECORD.size)
            if record[0] == number:
                yield record

    @property
    def names(self) -> list[str]:
        """Names by number."""
        return list(self._names)

    def _add(self, name: str) -> int:
        with self._lock:
            if name in self._names:
                return self._names[name]
            text = name.encode(errors="replace")[:255]
            end = self._names_end + _LENGTH.size + len(text)
            if not text or end + _LENGTH.size > FIRST:  # no text is how the names end
                return self._names[OTHER]
            self._memory[self._names_end : end] = _LENGTH.pack(len(text)) + text
            self._names_end = end
            self._names[name] = len(self._names)
            return self._names[name]

    def _open(self, path: Path, head: Mapping[str, Any], num_bytes: int) -> int:
        """Map the file; the number of the newest record in it."""
        old = read_head(path)
        goes_on = old is not None and all(old[0].get(key) == head.get(key) for key in ("boot", "capacity"))
        fd = open_or_create(path, os.O_RDWR | (0 if goes_on else os.O_TRUNC), 0o644)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # not only made longer: no SIGBUS on a full disk
            self._memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        if old is None or not goes_on:
            return 0
        self._names = {name: number for number, name in enumerate(old[1])}
        self._names_end += sum(_LENGTH.size + len(name.encode()) for name in old[1])
        return self._end()

    def _end(self) -> int:
        """The newest number in the memory: in the order of their places, numbers rise up to it."""
        low, high, first = 0, self.capacity, self._at(0)  # its place is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._at(middle) > first else (low, middle)
        return self._at(low)

    def _at(self, place: int) -> int:
        number: int = RECORD.unpack_from(self._memory, FIRST + place * RECORD.size)[0]
        return number


def read_head(path: Path) -> tuple[dict[str, Any], list[str]] | None:
    """The head and the names in file ``path``; None if it is no ring."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(FIRST)
        if len(data) < FIRST or not data.startswith(MAGIC):
            return None
        head = json.loads(data[len(MAGIC) : HEAD_BYTES])
    except (OSError, ValueError, RecursionError):  # the last of JSON that is nested without end
        return None
    names, at = [], HEAD_BYTES
    while at + _LENGTH.size <= FIRST and (length := _LENGTH.unpack_from(data, at)[0]):
        at += _LENGTH.size
        names.append(data[at : at + length].decode(errors="replace"))
        at += length
    return (head, names) if isinstance(head, dict) else None
