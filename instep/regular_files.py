"""Files that are what they should be: regular ones, in their place, and locked by a process that lives.

A pipe in the place of a file keeps its reader for ever, and a file that has been removed takes every write
without an error. So a file is opened without waiting and then looked at, and one that stays open is looked
for again where it was.

Where others can write too, a name that is known before the file is there can be taken by a stranger's link,
and then the stranger chooses what is written over. So what is written is made anew, or opened as itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
NO_OTHER_END = (errno.ENXIO, errno.ENODEV)  # of a socket, or of a pipe or a device that is written to
MODE = 0o666  # less the user's umask
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = MODE) -> int:
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


def open_or_create(path: str | os.PathLike[str], flags: int, mode: int = MODE) -> int:
    """A descriptor of the regular file ``path`` to write to, opened with ``flags``, and made if need be.

    Raises:
        OSError: a link stands in its place, or it is no regular file.
    """
    try:
        return open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        words = "expected a file or nothing, got a link, which another may have made: remove it"
        raise OSError(errno.ELOOP, words, os.fspath(path)) from None


def create(path: str | os.PathLike[str], mode: int = MODE) -> int:
    """A descriptor of a new file, to be written; FileExistsError if anything has its name, a link too."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_over(path: str | os.PathLike[str], mode: int = MODE) -> int:
    """The same in the place of whatever file or link has its name, which loses it and is left as it is."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return create(path, mode)


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
