"""Memory files (``mesh.memory_file``) as memory that other processes of the host can map.

A memory file has no name: it disappears with the last process that holds it, so nothing is ever left in
``/dev/shm``. Opening one proves that its owner is a process of the same user on the same host.
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

from instep.mesh.memory_file import MemoryFile
from instep.shm.futex import Words


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
