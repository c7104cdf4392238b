"""Nameless memory that other processes of the host can map.

``memfd_create`` gives a file that lives in memory and has no name: when the last process that holds it ends,
however it ends, the memory is gone, and nothing is ever left behind in ``/dev/shm``. Other processes open it
by the number of its descriptor, through ``/proc/PID/fd/NUMBER``, which only works for processes of the same
user on the same host: to have opened it is the proof of both.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.shm.futex import Words


@dataclass(frozen=True)
class Mapping:
    """Memory that is mapped for as long as a tensor, or ``words``, looks at it; ``fd`` is closed with it."""

    memory: mmap.mmap
    fd: int
    inode: int

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of it, with a storage of their own."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with torch.inference_mode(False):  # it outlives what it is made in
            return torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=nbytes)

    def words(self) -> Words:
        """All of it as 64-bit words."""
        return Words(memoryview(self.memory), self.tensor(0, 1).data_ptr())


def create(nbytes: int) -> Mapping:
    """New memory, zeroed; pages are taken when they are first written to."""
    fd = os.memfd_create("instep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return _map(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def attach(pid: int, fd: int) -> Mapping:
    """The memory that process ``pid`` holds as its descriptor ``fd``.

    Raises:
        OSError: it is not there, or belongs to another user or host.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(own, os.fstat(own).st_size)
    except BaseException:
        os.close(own)
        raise


def inode(pid: int, fd: int) -> int | None:
    """What tells the memory behind a descriptor from any other, or None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino
    except OSError:
        return None


def _map(fd: int, nbytes: int) -> Mapping:
    memory = mmap.mmap(fd, nbytes)
    with suppress(OSError):  # only a wish, and not every kernel knows it
        memory.madvise(mmap.MADV_HUGEPAGE)
    weakref.finalize(memory, os.close, fd)
    return Mapping(memory, fd, os.fstat(fd).st_ino)
