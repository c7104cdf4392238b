"""Nameless memory that other processes of the host can map.

``memfd_create`` gives a file that lives in memory and has no name: when the last process that holds it ends,
however it ends, the memory is gone, and nothing is ever left behind in ``/dev/shm``. Other processes open it
by the number of its descriptor, through ``/proc/PID/fd/NUMBER``, which only works for processes of the same
user on the same host: to have opened it is the proof of both.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.shm.futex import Words

NAME = "instep"  # of the memory, in /proc


@dataclass(frozen=True)
class Mapping:
    """Memory that is mapped for as long as a tensor, or ``words``, looks at it.

    ``fd``, by which others attach, is closed with it; it is -1 where the memory is another process's.
    """

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
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE, "no descriptor is left for shared memory: raise ulimit -n, or use larger buckets"
        ) from error
    try:
        os.ftruncate(fd, nbytes)
        memory = _map(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, os.close, fd)
    return Mapping(memory, fd, os.fstat(fd).st_ino)


def attach(pid: int, fd: int, inode: int | None = None) -> Mapping:
    """The memory that process ``pid`` holds as its descriptor ``fd``, and that had this ``inode``.

    The two numbers may come from a store to which others can write, so they are believed only where they lead
    to memory that a process of this user has made by ``create``: never to a file, nor to a stranger's memory.

    Raises:
        OSError: it is not there, or is other memory by now, or belongs to another user or host.
    """
    place = f"/proc/{pid}/fd/{fd}"
    _require_memory(place)  # before it is opened: a pipe would wait, a device might act
    own = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        _require_memory(f"/proc/self/fd/{own}")
        status = os.fstat(own)
        if status.st_uid != os.geteuid():
            raise OSError(f"descriptor {fd} of process {pid} is memory of user {status.st_uid}")
        if inode not in (None, status.st_ino):
            raise OSError(f"descriptor {fd} of process {pid} is not the memory that it was")
        return Mapping(_map(own, status.st_size), -1, status.st_ino)
    finally:
        os.close(own)


def _require_memory(place: str) -> None:
    if not os.readlink(place).startswith(f"/memfd:{NAME}"):
        raise OSError("it is no memory of instep's")


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
