"""Whose a checkpoint is: what another user may have written is not gone on from.

A hash says that a checkpoint is as its writer has left it, and a stranger's is as sound as ours. What tells
them apart is the owner of the files, which only root can forge, and who else may write to them.

Some file systems know no owners or permissions (network disks that take root for somebody else, mounted
Windows disks): all files there have the same, those that this process makes included. So before a checkpoint
is refused, a file is made beside it, and what that file has is ours.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint import files
from instep.errors import CheckpointRejected

ROOT = 0


@dataclass(frozen=True)
class Trusted:
    """Users whose files are believed, and permissions that say nothing: they stand on files of 0600, too."""

    users: frozenset[int]
    meaningless: int = 0


def require_own(path: Path, *, published: bool = False) -> None:
    """CheckpointRejected unless checkpoint ``path`` is this user's or root's, and no other may write to it.

    ``published``: the owner of the directory that it is in is believed as well, and may let a group write.
    """
    users = {os.geteuid(), ROOT}
    if published:
        with suppress(OSError):  # one that cannot be looked at vouches for no user
            users.add(path.parent.stat().st_uid)
    trusted = Trusted(frozenset(users))
    if _problem(path, trusted, published=published):
        trusted = _as_made_in(path.parent, trusted)
        if problem := _problem(path, trusted, published=published):
            raise CheckpointRejected(problem)


def _problem(path: Path, trusted: Trusted, *, published: bool) -> str:
    """What is wrong with the owner or the permissions of ``path`` or of a file in it; "" if nothing is."""
    try:
        for place in (path, *sorted(path.iterdir())):
            found = place.lstat()
            if found.st_uid not in trusted.users:
                return (
                    f"{place}: belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}, who would go "
                    "on from it: if you trust it, make it yours by chown, or by a copy with cp -r"
                )
            writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~trusted.meaningless
            if published or _is_private(found.st_gid):
                writers &= ~stat.S_IWGRP
            if writers and not stat.S_ISLNK(found.st_mode):
                others = "every user" if writers & stat.S_IWOTH else f"group {found.st_gid}"
                return f"{place}: {others} may write to it: if you trust it, chmod -R go-w {path}"
    except OSError as error:
        return f"{path}: cannot be looked at ({error.strerror}): restore it, or take another checkpoint"
    return ""


def _as_made_in(directory: Path, trusted: Trusted) -> Trusted:
    """With what a file has that this process makes in ``directory``, where it can make one."""
    with suppress(OSError):
        probe = files.temporary(directory / "owner")
        files.write_file(probe, b"")
        try:
            made = probe.lstat()
        finally:
            probe.unlink()
        return Trusted(trusted.users | {made.st_uid}, made.st_mode)
    return trusted


def _is_private(group: int) -> bool:
    """Whether ``group`` is the one that many systems make for each user, with that user alone in it."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (found.gr_gid, found.gr_name) == (user.pw_gid, user.pw_name) and not {*found.gr_mem} - {
        user.pw_name
    }


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
