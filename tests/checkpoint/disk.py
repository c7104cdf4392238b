"""A disk that fails at its n-th operation: once, from then on, or for good, as for a killed process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from instep.checkpoint import tensors

OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
NEVER = 10**9


class Killed(BaseException):
    """The process is gone: whatever it would still have done to the disk does not happen."""


class Disk:
    """Counts the operations on it and keeps their story; ``fail_at`` is the number of the first that fails.

    ``killed``: the fatal operation is torn in the middle and every later one fails too, so that no clean-up
    takes place; ``die`` may end the process in earnest. Otherwise an operation raises ``code``, and with
    ``lasting`` all that follow do so too.
    """

    def __init__(
        self,
        root: Path,
        *,
        fail_at: int = NEVER,
        killed: bool = False,
        code: int = errno.ENOSPC,
        lasting: bool = False,
    ) -> None:
        self.root = root
        self.fail_at = fail_at
        self.killed = killed
        self.code = code
        self.lasting = lasting
        self.story: list[tuple[str, str]] = []  # (operation, path or inode)
        self._synced = {path.lstat().st_ino for path in root.rglob("*")}

    @contextmanager
    def mounted(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            patch.setattr(tensors, "save_file", self._watched("save_file", tensors.save_file))
            yield self

    def cut_power(self, root: Path) -> None:
        """What was written and not synced is lost."""
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synced:
                os.truncate(path, 0)

    def _watched(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            subject, number = self._subject(name, args), len(self.story)
            if not self._holds(subject):  # another thread's: of /proc, or a pipe
                return operation(*args, **kwargs)
            self.story.append((name, subject))
            if number == self.fail_at or (self.lasting and number > self.fail_at):
                self._fail(name, operation, args, kwargs)
            if self.killed and number > self.fail_at:
                raise Killed
            if name != "fsync":
                return operation(*args, **kwargs)
            self._synced.add(os.fstat(args[0]).st_ino)

        return watched

    def _holds(self, subject: str) -> bool:
        """Whether ``subject`` lies on it; a name alone is in a directory that was opened before."""
        return subject.startswith(str(self.root)) or (not subject.startswith("/") and ":[" not in subject)

    def _subject(self, name: str, args: tuple[Any, ...]) -> str:
        if name in ("fsync", "write"):
            return os.readlink(f"/proc/self/fd/{args[0]}")
        return str(args[1] if name in ("rename", "save_file") else args[0])

    def _fail(self, name: str, operation: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if not self.killed:
            path = None if name in ("fsync", "write") else str(args[1] if name == "save_file" else args[0])
            raise OSError(self.code, os.strerror(self.code), path)  # the system names no file for an fd
        if name == "write":
            operation(args[0], args[1][: len(args[1]) // 2])
        if name == "save_file":
            operation(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        self.die()

    def die(self) -> NoReturn:
        """What happens to the process at the fatal operation."""
        raise Killed
