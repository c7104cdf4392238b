"""Files that are what they should be: regular ones, in their place, and locked by a process that lives.

A pipe in the place of a file keeps its reader for ever, and a file that has been removed takes every write
without an error. So a file is opened without waiting and then looked at, and one that stays open is looked
for again where it was.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
NO_OTHER_END = (errno.ENXIO, errno.ENODEV)  # of a socket, or of a pipe or a device that is written to
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of the regular file ``path``, as by ``os.open``; also the ``opener`` of ``open``.

    Raises:
        OSError: it is no regular file, which is found out without waiting for anything.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in NO_OTHER_END:
            raise _not_regular(path, os.stat(path).st_mode) from None
        raise
    found = os.fstat(fd).st_mode
    if stat.S_ISREG(found):
        return fd
    os.close(fd)
    raise _not_regular(path, found)


def require_in_place(fd: int, path: str | os.PathLike[str]) -> None:
    """OSError unless ``path`` still leads to what ``fd`` has open: else what is written there is lost."""
    try:
        in_place = os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError as error:
        if error.errno not in GONE:
            raise
        in_place = False
    if not in_place:
        problem = "removed or replaced while it was in use, and what is written there is lost: start again"
        raise OSError(errno.ESTALE, problem, os.fspath(path))


def try_lock(fd: int) -> bool | None:
    """True: locked, until ``fd`` is closed or its process ends. False: another process holds the lock. None:
    this file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _not_regular(path: str | os.PathLike[str], mode: int) -> OSError:
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    kind = KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(code, f"expected a regular file, got {kind}: move it away", os.fspath(path))
