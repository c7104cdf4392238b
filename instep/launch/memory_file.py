"""Files in memory without a name, through which a launcher and its ranks of one host exchange data. Pure.

A file with a name can disappear while a run uses it: cleaners of temporary directories remove old files, and
on tmpfs a page that is only written through a mapping never looks new. A full disk refuses it. A file of
``memfd_create`` has no name. Other processes open it by the number of its descriptor, through
``/proc/PID/fd/NUMBER``, which the kernel grants to processes of the same user alone; it ends with the last
process that has it open, so nothing is left behind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAME = "instep"  # in /proc


@dataclass(frozen=True)
class MemoryFile:
    """Descriptor ``fd`` of process ``pid``. It may be sent to other processes, which ``open`` it.

    The kernel reuses the numbers of closed descriptors; ``inode``, unless None, identifies the file.
    """

    pid: int
    fd: int
    inode: int | None

    @staticmethod
    def create(num_bytes: int = 0) -> MemoryFile:
        """A new file of this process, of ``num_bytes`` zeros, which the caller closes.

        Raises:
            OSError: no descriptor is left, or no memory.
        """
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)  # unlike ftruncate: no SIGBUS where memory is short
        except BaseException:
            os.close(fd)
            raise
        return MemoryFile(os.getpid(), fd, os.fstat(fd).st_ino)

    @property
    def path(self) -> Path:
        """Its name for as long as process ``pid`` has it open."""
        return Path(f"/proc/{self.pid}/fd/{self.fd}")

    def open(self) -> int:
        """A descriptor of this process, to read and write, with a position and locks of its own.

        The numbers may come from a store to which strangers can write, so only memory that a process of this
        user has created here is opened: never another file, nor another user's memory.

        Raises:
            OSError: process ``pid`` has closed it, or belongs to another user or another host.
        """
        _require_memory(self.path)  # before opening: a pipe would wait, a device might act
        own = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _require_memory(Path(f"/proc/self/fd/{own}"))
            found = os.fstat(own)
            if found.st_uid != os.geteuid():
                raise OSError(f"descriptor {self.fd} of process {self.pid} is memory of user {found.st_uid}")
            if self.inode not in (None, found.st_ino):
                raise OSError(f"descriptor {self.fd} of process {self.pid} is not the memory that it was")
        except BaseException:
            os.close(own)
            raise
        return own

    def close(self) -> None:
        """Close it here; processes that have opened it keep it."""
        os.close(self.fd)


def _require_memory(place: Path) -> None:
    if not os.readlink(place).startswith(f"/memfd:{NAME}"):
        raise OSError("it is no memory of instep's")
