"""Files in memory without a name, in which a launcher and its ranks of one host tell each other things. Pure.

A file with a name can be taken away while a run uses it: cleaners of temporary directories remove what looks
old, and on tmpfs a page that is only written to through a mapping never looks new. A full disk refuses it.
``memfd_create`` gives a file that has no name, so neither can happen. Others open it by the number of its
descriptor, through ``/proc/PID/fd/NUMBER``, which the kernel grants to processes of the same user alone; it
ends with the last process that has it open, so nothing is ever left behind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAME = "instep"  # as /proc shows it


@dataclass(frozen=True)
class MemoryFile:
    """Descriptor ``fd`` of process ``pid``. It may be sent to other processes, which ``open`` it.

    A number may come to stand for another file when it is free again; ``inode`` tells the two apart, unless
    it is None.
    """

    pid: int
    fd: int
    inode: int | None

    @staticmethod
    def create(num_bytes: int = 0) -> MemoryFile:
        """A new one of this process, of ``num_bytes`` zeros, to be closed by it.

        Raises:
            OSError: no descriptor is left, or no memory.
        """
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)  # not only made longer: no SIGBUS where memory is short
        except BaseException:
            os.close(fd)
            raise
        return MemoryFile(os.getpid(), fd, os.fstat(fd).st_ino)

    @property
    def path(self) -> Path:
        """The name by which it can be opened for as long as process ``pid`` holds it."""
        return Path(f"/proc/{self.pid}/fd/{self.fd}")

    def open(self) -> int:
        """A descriptor of this process, to read and write, with a position and locks of its own.

        The numbers may come from a store to which others can write, so they are believed only where they lead
        to memory that a process of this user has made here: never to a file, nor to a stranger's memory.

        Raises:
            OSError: process ``pid`` does not hold it any more, or is another user's or of another host.
        """
        _require_memory(self.path)  # before it is opened: a pipe would wait, a device might act
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
        """Let it go; processes that have opened it keep it."""
        os.close(self.fd)


def _require_memory(place: Path) -> None:
    if not os.readlink(place).startswith(f"/memfd:{NAME}"):
        raise OSError("it is no memory of instep's")
