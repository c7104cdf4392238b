"""Memory files (``launch.memory_file``) as memory that other processes of the host can map.

A memory file has no name: it disappears with the last process that holds it, so nothing is ever left in
``/dev/shm``. Opening one proves that its owner is a process of the same user on the same host.

Processes wait for ``Words`` in it. Polling a flag burns a core; with more ranks than cores, that is the core
the awaited rank needs. So a waiter polls for some microseconds, then sleeps on the address of the word
(``futex(2)``). The kernel compares the word once more before it lets the waiter sleep, so no change in
between is missed. Each word has one writer and only grows. Loads and stores are those of the native core,
which orders them on every processor: data written before a word is visible to whoever sees the word.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from instep.launch.memory_file import MemoryFile
from instep.native.library import absence, core

_NS = 1_000_000_000


def available() -> bool:
    """Whether ranks can share memory here."""
    return not why_not()


def why_not() -> str:
    """Why ranks cannot share memory here, or ""."""
    return f"shm needs Linux and the native core: {absence()}" if core() is None else ""


class Words:
    """Memory at ``address`` as 64-bit words; ``words[i]`` is one atomic load or store.

    ``memory`` is kept alive. Words that different ranks write belong on different cache lines.
    """

    def __init__(self, memory: object, address: int) -> None:
        native = core()
        assert native is not None, "checked by why_not()"
        self.address = address
        self._memory, self._native = memory, native

    def __getitem__(self, i: int) -> int:
        return self._native.load(self.address + 8 * i)

    def __setitem__(self, i: int, value: int) -> None:
        self._native.store(self.address + 8 * i, value)

    def post(self, i: int, value: int) -> None:
        """Store ``value`` in word i and wake all sleepers."""
        self[i] = value
        self.wake(i)

    def wake(self, i: int) -> None:
        """Wake all that sleep on word i."""
        self._native.wake(self.address + 8 * i)

    def spin(self, i: int, target: int, seconds: float) -> bool:
        """Poll word i for at most ``seconds``; whether it reached ``target``."""
        return bool(self._native.spin(self.address + 8 * i, target, int(seconds * _NS)))

    def sleep(self, i: int, target: int, seconds: float) -> None:
        """Sleep until word i changes or is woken, at most ``seconds``; not if it is at ``target`` already."""
        self._native.sleep(self.address + 8 * i, target, int(seconds * _NS))


@dataclass(frozen=True)
class Mapping:
    """Memory that stays mapped as long as a tensor or a ``Words`` refers to it.

    ``fd``, by which other processes attach, is closed with it; -1 if the memory is another process's.
    """

    memory: mmap.mmap
    fd: int
    inode: int

    @cached_property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.tensor(0, 1).data_ptr()

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """``nbytes`` bytes from ``offset`` on, uint8, with their own storage."""
        return tensor_over(memoryview(self.memory), offset, nbytes)

    def words(self) -> Words:
        """The whole memory as 64-bit words."""
        return Words(self.memory, self.address)


def tensor_over(memory: memoryview, offset: int, nbytes: int) -> Tensor:
    """``nbytes`` bytes of ``memory`` from ``offset`` on, uint8; the tensor keeps ``memory`` alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with torch.inference_mode(False):  # it outlives the block that it is made in
        return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=nbytes)


def create(nbytes: int) -> Mapping:
    """New memory, zeroed; the kernel allocates a page at its first write.

    Raises:
        OSError: no descriptor or memory is left.
    """
    try:
        file = MemoryFile.create()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        message = "no descriptor is left for shared memory: raise ulimit -n, or use larger buckets"
        raise OSError(errno.EMFILE, message) from error
    try:
        os.ftruncate(file.fd, nbytes)
        memory = _map(file.fd, nbytes)
    except BaseException:
        file.close()
        raise
    weakref.finalize(memory, file.close)
    return Mapping(memory, file.fd, os.fstat(file.fd).st_ino)


def attach(pid: int, fd: int, inode: int | None = None) -> Mapping:
    """Map the memory behind descriptor ``fd`` of process ``pid``; ``inode`` identifies it if given.

    Raises:
        OSError: it is gone, is other memory by now, or belongs to another user or host.
    """
    own = MemoryFile(pid, fd, inode).open()
    try:
        status = os.fstat(own)
        return Mapping(_map(own, status.st_size), -1, status.st_ino)
    finally:
        os.close(own)


def inode(pid: int, fd: int) -> int | None:
    """The inode of the memory behind descriptor ``fd`` of process ``pid``, or None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino
    except OSError:
        return None


def _map(fd: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(fd, nbytes)
    with suppress(OSError):  # only a hint, which some kernels do not know
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
