"""The run directory: what a run leaves on disk while it goes on, and when it is done.

    config.toml      the resolved config            workers.json   rank to process, while the run goes on
    metrics.jsonl    a line per step, to plot       ledger.jsonl   a line per step, to compare bit by bit
    summary.json     the figures of the whole run   checkpoints/   step-00000100/ ...
    faults.jsonl     what went wrong, and what it took to go on
    trace/           what each rank did when, in its last steps; and what instep report makes of it
    report.html      by instep report, with report.json        tensorboard/, wandb/   if they are asked for
    run.lock         which process has claimed it, while the run goes on

Rank 0 writes, and the process that starts the ranks; but for trace/, where every rank has a file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from instep.net.peers import RECORD_BYTES, Peer, is_alive, own_peer
from instep.regular_files import open_regular, require_in_place, try_lock
from instep.run.jsonl import read_object, replace_text
from instep.run.shape import COUNT, TEXT, Shape
from instep.run.toml import CONFIG

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WORKERS = "workers.json"
FAULTS = "faults.jsonl"
CHECKPOINTS = "checkpoints"
RUNS = Path("runs")  # where a directory is made for a run that names none
MADE_UP = re.compile(r"train-[0-9]{8}-[0-9]{6}(-(?P<launch>[0-9a-f]{16}))?(-[0-9]{1,3})?")
LOCK = "run.lock"
PEER = Shape({"host": TEXT}, required={field.name for field in fields(Peer)}, others=COUNT)


class Claim(Protocol):
    """What is asked for: a directory, or None for a new one in ``runs/``; and to go on with what is in it."""

    @property
    def run_dir(self) -> Path | None:
        """Where the run is recorded."""

    @property
    def resume(self) -> bool:
        """Whether an earlier command has begun it."""


class Claimed:
    """A run directory that no other command may claim, until ``release`` or the end of this process.

    The lock is the kernel's, on an open file: it goes with its holder, however that ends. What the file says
    is for those who find it locked, and decides only where the file system has no locks.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Lock the directory ``path``; ValueError names the process that has it locked."""
        self.path = path
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fd = _lock(path, say)
        except BaseException:
            os.close(self._directory)
            raise

    def require_in_place(self) -> None:
        """OSError if the directory was removed or replaced: the run's files are no longer where they were."""
        require_in_place(self._directory, self.path)

    def release(self) -> None:
        """No process works here any more; if the run has not even begun, it leaves no empty directory."""
        self._remove(WORKERS)
        self._remove(LOCK)
        with suppress(OSError):
            self.require_in_place()
            self.path.rmdir()  # which fails if anything is in it
        self._close()

    def unlock(self) -> None:
        """This process has nothing to do here; all stays as it was found."""
        self._remove(LOCK)
        self._close()

    def _close(self) -> None:
        os.close(self._directory)
        os.close(self._fd)

    def _remove(self, name: str) -> None:
        with suppress(OSError):  # nothing here may hide the error that ends the run
            os.unlink(name, dir_fd=self._directory)

    def __enter__(self) -> Claimed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(config: Claim, say: Callable[[str], None], launch: str = "") -> Claimed:
    """The directory of this run, made if need be, and locked; nothing else in it is touched.

    ``say`` is told where the file system has no locks. A name that is made up has ``launch`` in it, by which
    ``of_launch`` finds the directory again.

    Raises:
        ValueError: it holds another run, or that run is still going on, or there is nothing to resume.
        PermissionError: it cannot be written to.
    """
    path = _directory(config, launch)
    claimed = Claimed(path, say)
    try:
        _require_free(config, path)
    except BaseException:
        claimed.unlock()
        raise
    return claimed


def _directory(config: Claim, launch: str) -> Path:
    """Where the run is to be recorded: a directory that can be written to."""
    if config.run_dir is None:
        if config.resume:
            raise ValueError(f"--resume needs --run-dir: which run shall go on? {_newest_run()}".rstrip())
        return _make(RUNS / (time.strftime("train-%Y%m%d-%H%M%S") + f"-{launch}" * bool(launch)), fresh=True)
    if config.resume and not config.run_dir.exists():
        raise ValueError(f"{config.run_dir} does not exist, so there is no run to resume: look at --run-dir")
    path = _make(config.run_dir, fresh=False)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"run directory {path} cannot be written to: pass another --run-dir")
    return path


def _newest_run() -> str:
    """Words that name it, if there is one."""
    configs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob(f"*/{CONFIG}")]
    return f"The newest is --run-dir {shlex.quote(str(max(configs)[1]))}" if configs else ""


def _require_free(config: Claim, path: Path) -> None:
    """ValueError unless ``path``, which is locked, may be begun in, or gone on with."""
    is_empty = all(entry.name == LOCK for entry in path.iterdir())
    holds_run = (path / CONFIG).exists()
    if config.resume:
        # Ranks outlive the command that held the lock for a moment, and where there are no locks for longer.
        busy = [f"rank {peer.rank} (pid {peer.pid})" for peer in workers(path) if is_alive(peer)]
        if busy:
            raise ValueError(
                f"{path}: ranks of the run are still alive, {', '.join(busy)}: wait for them, or end them"
            )
        if not is_empty and not holds_run:
            raise ValueError(f"{path} has other files and no run to resume: check --run-dir")
    elif holds_run:
        raise ValueError(f"{path} has another run: pass --resume to resume it, or another --run-dir")
    elif not is_empty:
        raise ValueError(f"{path} has other files: pass another --run-dir")


def _lock(path: Path, say: Callable[[str], None]) -> int:
    """The descriptor of the lock of directory ``path``, which this process holds from here on."""
    while True:
        fd = open_regular(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            _take_lock(fd, path, say)
            require_in_place(fd, path / LOCK)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.ESTALE:
                raise
        except BaseException:
            os.close(fd)
            raise
        else:
            return fd


def _take_lock(fd: int, path: Path, say: Callable[[str], None]) -> None:
    """Lock ``fd`` and put this process's name into it."""
    locked = try_lock(fd)
    holder = _holder(fd)
    if locked is False or (locked is None and holder is not None and is_alive(holder)):
        who = f"pid {holder.pid} on {holder.host}" if holder else "another process"
        raise ValueError(f"{path}: directory in use by {who}: wait for it, end it, or pass another --run-dir")
    if locked is None:
        say(
            f"{path}: this file system has no locks: do not start another command in this directory meanwhile"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, own_peer(0).to_bytes(), 0)


def _holder(fd: int) -> Peer | None:
    """The process that has locked, or had locked, the file, as far as it says."""
    try:
        return Peer.from_bytes(os.pread(fd, RECORD_BYTES, 0))
    except (ValueError, TypeError, KeyError, OverflowError):  # it has not said it yet
        return None


def of_launch(launches: Collection[str]) -> Path | None:
    """The newest run in ``runs/`` whose name was made up for one of ``launches``; None if there is none."""
    found = []
    with suppress(FileNotFoundError), os.scandir(RUNS) as entries:
        for entry in entries:
            name = MADE_UP.fullmatch(entry.name)
            if name and name["launch"] in launches and entry.is_dir(follow_symlinks=False):
                found.append(RUNS / entry.name)
    return max((path for path in found if (path / CONFIG).exists()), default=None)


def made_up(name: str) -> Path:
    """The directory that another rank has made up the ``name`` of; ValueError if it is no such name."""
    if not MADE_UP.fullmatch(name):
        raise ValueError(f"expected the name of a new run directory, got {name[:80]!r}: pass --run-dir")
    return RUNS / name


def begin(path: Path, config: str, peers: Sequence[Peer]) -> None:
    """Write what holds for the whole run: its settings, as TOML, and its processes."""
    replace_text(path / CONFIG, config)
    records = {str(peer.rank): asdict(peer) for peer in peers}
    replace_text(path / WORKERS, json.dumps(records, indent=1) + "\n")


def end(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the figures: none of an earlier part stays, which may have been made on other ranks."""
    replace_text(path / SUMMARY, json.dumps(summary, indent=1) + "\n")


def workers(path: Path) -> list[Peer]:
    """The processes that work, or have worked, in ``path``, as far as it says."""
    records = read_object(path / WORKERS).values()
    return [] if any(map(PEER.problem, records)) else [Peer(**record) for record in records]


def _make(path: Path, *, fresh: bool) -> Path:
    """``path`` as a directory; with ``fresh`` one that was not there, with a number if need be."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))] if fresh else [path]
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=not fresh)
        except FileExistsError:
            if not fresh:
                kind = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
                raise ValueError(f"{path} is {kind}, expected a directory: pass another --run-dir") from None
        except OSError as error:
            raise PermissionError(
                f"run directory {path} cannot be made ({error.strerror}): pass another --run-dir"
            ) from None
        else:
            return candidate
    raise FileExistsError(f"{path} and 998 more of that name exist: pass --run-dir")
