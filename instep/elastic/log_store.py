"""The store of one generation: keys and values in a log, in memory that all of its ranks have open.

torch's ``FileStore`` opens its path anew at every operation. When the path is gone it waits five minutes for
it to come back, and when the path stands for another file by then, it writes into that. Here a rank opens the
memory once, and has it for as long as it has the store.

    | lengths | key | value | lengths | key | value | ...       the last one of a key counts

A lock on the memory makes each operation one step for all ranks; the kernel takes it from a rank that dies.
What such a rank has written of a record is no record, and the next one is written over it.

A store knows no processes: a rank that dies between two of its keys would be missed until the deadline. So
once the generation ``is_over()``, as the supervisor says, everything raises, a wait too, which is cut into
slices.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from instep.errors import PeerLost
from instep.launch.memory_file import MemoryFile

_LENGTHS = struct.Struct("<ii")
_DELETED = -1  # instead of the length of a value
SLICE_S = 0.005


class LogStore(dist.Store):
    """The store in ``file`` of a generation, until that ``is_over()``; ``PeerLost`` from then on."""

    def __init__(
        self, file: MemoryFile, is_over: Callable[[], bool] = lambda: False, timeout_s: float = 300.0
    ) -> None:
        super().__init__()
        self._inode, self._is_over, self._timeout_s = file.inode, is_over, timeout_s
        self._fd = file.open()
        weakref.finalize(self, os.close, self._fd)
        self._values: dict[str, bytes] = {}
        self._end = 0  # of the records that are in ``_values``
        self._lock = threading.Lock()  # threads share the descriptor, and with it the lock of the process

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked():
            self._append(key, _bytes(value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all ``keys`` are there.

        Raises:
            PeerLost: the generation has ended.
            DistStoreError: they did not come in time.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")
            time.sleep(SLICE_S)

    def get(self, key: str) -> bytes:
        """The value of ``key``, when it is there."""
        self.wait([key])
        with self._locked():
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._locked():
            total = int(self._values.get(key, b"0")) + amount
            self._append(key, str(total).encode())
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._locked():
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._locked():
            found = self._values.get(key)
            if found == _bytes(expected) or (found is None and not expected):
                self._append(key, _bytes(desired))
                return _bytes(desired)
            return _bytes(expected) if found is None else found

    def delete_key(self, key: str) -> bool:
        with self._locked():
            known = key in self._values
            if known:
                self._append(key, None)
            return known

    def num_keys(self) -> int:
        with self._locked():
            return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> LogStore:
        """Another one, of memory that its maker may have let go."""
        own = MemoryFile(os.getpid(), self._fd, self._inode)
        return LogStore(own, self._is_over, self._timeout_s)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """In the block ``_values`` are those of now, and no other rank changes them."""
        if self._is_over():
            raise PeerLost("a rank was lost during the rendezvous", operation="the rendezvous")
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._catch_up()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Read what other ranks have appended."""
        data, begin = os.pread(self._fd, os.fstat(self._fd).st_size - self._end, self._end), 0
        while begin + _LENGTHS.size <= len(data):
            key_bytes, value_bytes = _LENGTHS.unpack_from(data, begin)
            value = begin + _LENGTHS.size + key_bytes
            end = value + max(value_bytes, 0)
            if end > len(data):
                break
            key = data[value - key_bytes : value].decode()
            if value_bytes == _DELETED:
                self._values.pop(key, None)
            else:
                self._values[key] = data[value:end]
            begin = end
        self._end += begin

    def _append(self, key: str, value: bytes | None) -> None:
        name = key.encode()
        record = _LENGTHS.pack(len(name), _DELETED if value is None else len(value)) + name + (value or b"")
        os.ftruncate(self._fd, self._end)  # a rank may have died in the middle of the next line
        if os.pwrite(self._fd, record, self._end) != len(record):
            raise OSError(errno.ENOSPC, "no memory is left for the store in which ranks meet")
        self._catch_up()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
