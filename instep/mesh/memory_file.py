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


@dataclass(frozen=True)
class MemoryFile:
    """Descriptor ``fd`` of process ``pid``. It may be sent to other processes, which ``open`` it.

    A number may come to stand for another file when it is free again; ``inode`` tells the two apart.
    """

    pid: int
    fd: int
    inode: int

    @staticmethod
    def create(num_bytes: int = 0) -> MemoryFile:
        """A new one of this process, of ``num_bytes`` zeros, to be closed by it.

        Raises:
            OSError: no descriptor is left, or no memory.
        """
        fd = os.memfd_create("instep", os.MFD_CLOEXEC)
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

        Raises:
            OSError: process ``pid`` does not hold it any more, or is another user's.
        """
        own = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(own).st_ino != self.inode:
            os.close(own)
            raise FileNotFoundError(f"descriptor {self.fd} of process {self.pid} is not the file that it was")
        return own

    def close(self) -> None:
        """Let it go; processes that have opened it keep it."""
        os.close(self.fd)
