"""The run directory, claimed by one command at a time, and the files that hold for all of a run.

The process that starts the ranks claims it, or all ranks of another launcher together. ``record.directory``
has the names of its files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.checkpoint.files import remove, step_directories
from instep.launch.launch_environment import LAUNCH_DIGITS, LaunchEnvironment
from instep.net.agree import on_first_rank, require_same_lines
from instep.net.peers import RECORD_BYTES, Peer, is_alive, own_peer
from instep.net.process_group import Group
from instep.record.directory import CHECKPOINTS, CONFIG, FAULTS, RECORD, SUMMARY, WORKERS
from instep.record.jsonl import replace_text, to_json
from instep.record.status import workers
from instep.record.step_lines import starts, steps_recorded
from instep.regular_files import open_regular, require_in_place, try_lock
from instep.run.writer import require_readable
from instep.timeline.trace_files import FOLDER as TRACES

RUNS = Path("runs")  # where a directory is made for a run that names none
MADE_UP = re.compile(r"train-[0-9]{8}-[0-9]{6}(-(?P<launch>[0-9a-f]{16}))?(-[0-9]{1,3})?")
LOCK = "run.lock"


class Claimed:
    """A run directory that no other command may claim, until ``release`` or the end of this process.

    The lock is the kernel's, on an open file: it goes with its holder, however that ends. What the file says
    is for those who find it locked, and decides only where the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        """Lock the directory ``path``; ValueError names the process that has it locked."""
        self.path = path
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fd = _lock(path)
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


def claim(run_dir: Path | None, resume: bool, launch: str = "") -> Claimed:
    """The directory ``run_dir``, made if need be, and locked; None makes a new one in ``runs/``.

    ``resume``: an earlier command has begun the run. Without it the files of a run that never made a step are
    removed, and no others. A name that is made up has ``launch`` in it, by which ``of_launch`` finds the
    directory again.

    Raises:
        ValueError: it holds another run, or that run is still going on, or there is nothing to resume.
        PermissionError: it cannot be written to.
    """
    path = _directory(run_dir, resume, launch)
    claimed = Claimed(path)
    try:
        _require_free(path, resume)
        require_readable(path)
    except BaseException:
        claimed.unlock()
        raise
    return claimed


def claim_together(
    run_dir: Path | None,
    resume: bool,
    place: LaunchEnvironment,
    group: Group,
    hold: Callable[[Claimed], object],
) -> tuple[Path, bool]:
    """As ``claim``, by all ranks of a launcher: the run directory, and whether to go on with what is in it.

    Collective. The launcher's store could carry the path over a restart, but others may write to it, and a
    run that believed it would go on from a stranger's checkpoint. So a path is what this rank's own config
    says, and a name that was made up is found again in ``runs/`` by what this start is known by. The first
    rank is to ``hold`` the directory for all.

    Raises:
        ValueError: the ranks were given different directories, or as ``claim``; or a restart cannot
            know its directory.
    """
    require_same_lines(group, "run_dir", [str(run_dir)], fix=": give all ranks the same --run-dir, or none")
    told = group.all_gather_bytes(place.launch.encode(), "the comparison of launches", limit=LAUNCH_DIGITS)
    restarted = bool(place.restart_count)

    def claim_for_all() -> tuple[str, bool]:
        if run_dir is None and restarted and place.source == "torchrun" and not place.launch:
            raise ValueError("this torchrun does not say which run it restarts: pass --run-dir")
        launches = {launch.decode() for launch in told if launch}
        known = run_dir or (of_launch(launches) if restarted else None)
        begun = restarted and known is not None and (known / CONFIG).exists()
        claimed = claim(known, resume or begun, place.launch)
        hold(claimed)
        return claimed.path.name, resume or begun

    name, resume = on_first_rank(group, "claiming the run directory", claim_for_all)
    return run_dir or made_up(name), resume


def _directory(run_dir: Path | None, resume: bool, launch: str) -> Path:
    """Where the run is to be recorded: a directory that can be written to."""
    if run_dir is None:
        if resume:
            raise ValueError(f"--resume needs --run-dir: which run shall go on? {_newest_run()}".rstrip())
        return _make(RUNS / (time.strftime("train-%Y%m%d-%H%M%S") + f"-{launch}" * bool(launch)), fresh=True)
    if resume and not run_dir.exists():
        raise ValueError(f"{run_dir} does not exist, so there is no run to resume: look at --run-dir")
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        name = str(run_dir).encode(errors="backslashreplace").decode()
        raise ValueError(f"run directory {name} is not valid UTF-8: pass another --run-dir") from None
    path = _make(run_dir, fresh=False)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"run directory {path} cannot be written to: pass another --run-dir")
    return path


def _newest_run() -> str:
    """Words that name it, if there is one."""
    configs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob(f"*/{CONFIG}")]
    return f"The newest is --run-dir {shlex.quote(str(max(configs)[1]))}" if configs else ""


def _require_free(path: Path, resume: bool) -> None:
    """ValueError unless ``path``, which is locked, may be begun in, or gone on with."""
    holds_run = (path / CONFIG).exists()
    if not holds_run and any(entry.name != LOCK for entry in path.iterdir()):
        fix = " and no run to resume: check --run-dir" if resume else ": pass another --run-dir"
        raise ValueError(f"{path} has other files{fix}")
    stepless = not resume and {start["step"] for start in starts(path)} == {0} and steps_recorded(path) <= 0
    saved = step_directories(path / CHECKPOINTS) if stepless else []  # at most the initial state's
    if holds_run and not resume and (not stepless or any(step for step, _ in saved)):
        raise ValueError(f"{path} has another run: pass --resume to resume it, or another --run-dir")
    # Ranks outlive the command that held the lock for a moment, and where there are no locks for longer.
    if busy := [f"rank {peer.rank} (pid {peer.pid})" for peer in workers(path) if is_alive(peer)]:
        raise ValueError(
            f"{path}: ranks of the run are still alive, {', '.join(busy)}: wait for them, or end them"
        )
    if stepless:
        for _, checkpoint in saved:
            remove(checkpoint)
        shutil.rmtree(path / TRACES, ignore_errors=True)
        for name in (FAULTS, RECORD, CONFIG):
            (path / name).unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """The descriptor of the lock of directory ``path``, which this process holds from here on."""
    while True:
        fd = open_regular(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            _take_lock(fd, path)
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


def _take_lock(fd: int, path: Path) -> None:
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
    """Write the figures of the whole run, in the place of an earlier part's."""
    replace_text(path / SUMMARY, to_json(summary, indent=1) + "\n")


def how_to_go_on(path: Path, resume: str = "") -> str:
    """What there is in ``path`` of a run that was interrupted, and what goes on with it, by default flags."""
    resume = resume or f"--resume --run-dir {shlex.quote(str(path))}"
    with suppress(OSError):
        steps = [step for step, _ in step_directories(path / CHECKPOINTS)]
        if steps:
            return f"with a checkpoint of step {steps[0]}: resume with {resume}"
    return f"before its first checkpoint: {resume} starts over"


def say(text: str) -> None:
    """What people shall read, of the run."""
    print(text, file=sys.stderr, flush=True)


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
