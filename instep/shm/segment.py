"""Memory files (``mesh.memory_file``) as memory that other processes of the host can map.

When the last process that holds one ends, however it ends, the memory is gone, and nothing is ever left
behind in ``/dev/shm``. To have opened one is the proof that its maker is of the same user, on the same host.
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
    """Memory that is mapped for as long as a tensor, or ``words``, looks at it.

    ``fd``, by which others attach, is closed with it; it is -1 where the memory is another process's.
    """

    memory: mmap.mmap
    fd: int
    inode: int

    @cached_property
    def address(self) -> int:
        """Of its first byte, in this process."""
        return self.tensor(0, 1).data_ptr()

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of it, with a storage of their own."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with torch.inference_mode(False):  # it outlives what it is made in
            return torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=nbytes)

    def words(self) -> Words:
        """All of it as 64-bit words."""
        return Words(memoryview(self.memory), self.address)


def create(nbytes: int) -> Mapping:
    """New memory, zeroed; pages are taken when they are first written to."""
    try:
        file = MemoryFile.create()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE, "no descriptor is left for shared memory: raise ulimit -n, or use larger buckets"
        ) from error
    try:
        os.ftruncate(file.fd, nbytes)
        memory = _map(file.fd, nbytes)
    except BaseException:
        file.close()
        raise
    weakref.finalize(memory, file.close)
    return Mapping(memory, file.fd, os.fstat(file.fd).st_ino)


def attach(pid: int, fd: int, inode: int | None = None) -> Mapping:
    """The memory that process ``pid`` holds as its descriptor ``fd``, and that had this ``inode``.

    Raises:
        OSError: it is not there, or is other memory by now, or belongs to another user or host.
    """
    own = MemoryFile(pid, fd, inode).open()
    try:
        status = os.fstat(own)
        return Mapping(_map(own, status.st_size), -1, status.st_ino)
    finally:
        os.close(own)


def inode(pid: int, fd: int) -> int | None:
    """What tells the memory behind a descriptor from any other, or None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino
    except OSError:
        return None


def _map(fd: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(fd, nbytes)
    with suppress(OSError):  # only a wish, and not every kernel knows it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
