"""Files that are regular, at their path, and locked by a live process.

Reading from a pipe in the place of a file blocks forever, and writing to a removed file succeeds without an
error. So a file is opened without blocking and then inspected, and one that stays open is compared with its
path.

Where others can write, a stranger can put a link at a name that is known in advance, and so choose which file
is overwritten. So a file to write is created anew, or opened without following links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
NO_OTHER_END = (errno.ENXIO, errno.ENODEV)  # of a socket, or a pipe or a device opened for writing
MODE = 0o666  # less the user's umask
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = MODE) -> int:
    """A descriptor of the regular file ``path``, as by ``os.open``; also the ``opener`` of ``open``.

    Raises:
        OSError: ``path`` is no regular file; found without blocking.
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
    """A descriptor of the regular file ``path`` for writing, opened with ``flags``, created if missing.

    Raises:
        OSError: ``path`` is a link, or no regular file.
    """
    try:
        return open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        words = "expected a file or nothing, got a link, which another may have made: remove it"
        raise OSError(errno.ELOOP, words, os.fspath(path)) from None


def create(path: str | os.PathLike[str], mode: int = MODE) -> int:
    """A descriptor of a new file for writing; FileExistsError if the name exists, also as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_over(path: str | os.PathLike[str], mode: int = MODE) -> int:
    """As ``create``, but an existing file or link loses its name first; its content is left alone."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return create(path, mode)


def require_in_place(fd: int, path: str | os.PathLike[str]) -> None:
    """Raise OSError unless ``path`` still names the open file ``fd``: else what is written there is lost."""
    try:
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return
    except OSError as error:
        if error.errno not in GONE:
            raise
    problem = "removed or replaced while it was in use, and what is written there is lost: start again"
    raise OSError(errno.ESTALE, problem, os.fspath(path))


def try_lock(fd: int) -> bool | None:
    """True: locked until ``fd`` is closed or its process ends. False: another process has the lock. None: the
    file system has no locks.
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
    kind = KINDS.get(stat.S_IFMT(mode), "a device")
    return OSError(code, f"expected a regular file, got {kind}: move it away", os.fspath(path))
