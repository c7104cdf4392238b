"""Directories that appear whole or not at all, and the names that checkpoints have among them.

Why. A save that is killed half-way must not leave anything that looks like a checkpoint, and a save over an
existing one can leave a mixture of two steps that loads without an error. So nothing is ever overwritten:

    .step-00001234.tmp-<random>/     written under a temporary name; every file synced, then the directory
            |  rename: atomic
    step-00001234/                   then the parent is synced: a power cut can no longer undo the rename

The writer holds a lock on its temporary directory, and the kernel releases it when the writer dies, however
it dies. A temporary directory that can be locked is therefore garbage: no clock and no process id is asked.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from instep.regular_files import create, open_regular, try_lock

PLAIN_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
STEP_NAME = re.compile(r"step-([0-9]{8})")
TEMPORARY_NAME = re.compile(r"\.[A-Za-z0-9._-]{1,64}\.tmp-[0-9a-f]{16}")
CHUNK_BYTES = 1 << 20


def step_name(step: int) -> str:
    """``1234`` -> ``step-00001234``."""
    if not 0 <= step < 10**8:
        raise ValueError(f"expected a step from 0 to 99999999, got {step}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The inverse of :func:`step_name`; None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_directories(parent: Path) -> list[tuple[int, Path]]:
    """The directories of ``parent`` that are named like a step, newest first; symbolic links are none.

    ``parent`` may be a link, but not to nothing: that is a disk which is not there, and not a run which has
    no checkpoints yet.
    """
    try:
        entries = [entry for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        if parent.is_symlink():
            problem = f"is a link to {os.readlink(parent)}, which is not there: mount it, or remove the link"
            raise FileNotFoundError(errno.ENOENT, problem, str(parent)) from None
        return []
    steps = [(step, Path(entry.path)) for entry in entries if (step := step_of(entry.name)) is not None]
    return sorted(steps, reverse=True)


def make_directory(path: Path) -> None:
    """``mkdir -p`` whose result survives a power cut."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent, follow_links=True)


def publish(parent: Path, name: str, write: Callable[[Path], None], *, token: str | None = None) -> Path:
    """Let ``write`` fill a temporary directory (mode 0700), then give it its ``name`` in ``parent``.

    When this returns, the directory is on the disk. When it raises, and be it what ``write`` raised, the
    temporary directory is gone and ``parent`` is as it was; only a failed sync of ``parent`` itself leaves
    the new directory there, whole. An existing ``name`` is never replaced: FileExistsError. Others who write
    to the temporary directory know it by ``token``, 16 random hexadecimal digits; as they wait for it, it is
    made also where ``name`` is there already.
    """
    if not PLAIN_NAME.fullmatch(name):
        raise ValueError(
            f"expected a name of 1 to 64 of A-Z a-z 0-9 . _ - without a leading dot, got {name!r}"
        )
    target = parent / name
    if token is None:
        refuse_existing(target)
    path, lock = _begin(parent, name, token)
    try:
        write(path)
        for file in sorted(path.rglob("*")):
            sync(file)
        sync(path)
        refuse_existing(target)
        try:
            os.rename(path, target)
        except OSError:
            refuse_existing(target)  # made since by another save: not "directory not empty"
            raise
        sync(parent, follow_links=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return target


def refuse_existing(target: Path) -> None:
    """FileExistsError if ``target`` is there."""
    if os.path.lexists(target):
        raise FileExistsError(
            errno.EEXIST, "exists already and is never overwritten: move it away", str(target)
        )


def temporary(path: Path, token: str | None = None) -> Path:
    """Where what becomes ``path`` is written first."""
    return path.with_name(f".{path.name}.tmp-{token or secrets.token_hex(8)}")


def _begin(parent: Path, name: str, token: str | None) -> tuple[Path, int]:
    """A new temporary directory, and the descriptor whose lock says that its writer lives."""
    while True:
        path = temporary(parent / name, token)
        os.mkdir(path, 0o700)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # a cleaner came between mkdir and open: take another name
            continue
        except OSError:
            with suppress(OSError):
                path.rmdir()
            raise
        if try_lock(lock) is not False and path.exists():
            return path, lock
        os.close(lock)


def remove(path: Path) -> None:
    """Delete a directory; it loses its name first, so that half of it never looks like a checkpoint."""
    doomed = temporary(path)
    os.rename(path, doomed)
    try:
        shutil.rmtree(doomed)
    except OSError as error:  # it names the file only, not where it is
        raise OSError(error.errno, error.strerror, str(doomed)) from error


def set_aside(path: Path) -> Path:
    """Rename a directory so that its name is free and its content still there; return the new path."""
    aside = path.with_name(f"{path.name}.rejected-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def remove_stale(parent: Path) -> list[Path]:
    """Delete the temporary directories of ``parent`` whose writers are dead; return what was deleted."""
    with os.scandir(parent) as entries:
        names = [
            e.name for e in entries if TEMPORARY_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
        ]
    return [path for name in sorted(names) if _remove_if_stale(path := parent / name)]


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # its writer has just published it
        return False
    try:
        if not try_lock(fd):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that does not say which file it is about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path, *, follow_links: bool = False) -> None:
    """Make a file's or directory's content durable, and drop it from the page cache.

    A reader that verifies the file afterwards sees what the disk holds, not what memory remembers. A link is
    followed where users may have put one: in the place of the directory that holds the checkpoints.
    """
    fd = os.open(path, os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW))
    try:
        with naming(path):
            os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Create ``path`` (mode 0600) with ``data``; the directory's publisher syncs it."""
    fd = create(path, 0o600)
    try:
        with naming(path):
            while data:
                data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open for reading what must be a regular file: a link is not followed, a pipe is not waited for."""
    fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file, naming(path):
        yield file


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes in hexadecimal, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
