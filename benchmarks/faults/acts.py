"""What is done to a run from outside: signals to the command and to its ranks, damage to its checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from benchmarks.faults.command import Live, listening
from instep.checkpoint import files
from instep.record.directory import CHECKPOINTS

Act: TypeAlias = Callable[[Live], None]
Damage: TypeAlias = Callable[[Path], None]  # of a run directory
Through: TypeAlias = Callable[[list[str], Path], list[str]]  # words and a corner to words

INSTEP = [sys.executable, "-m", "instep"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
MOUNTED = """\
mount -t tmpfs -o "size=$1" tmpfs "$2" || exit 99
shift 2
"$@"
code=$?
cp -a "$OLDPWD/mnt/." . || exit 98
exit $code
"""
BOUND = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99; shift; exec "$@"'


@dataclass(frozen=True)
class Signalled:
    """A rank gets a signal after step ``at``, and SIGCONT ``cont_s`` later if that is above 0."""

    number: signal.Signals
    at: int
    rank: int = 1
    cont_s: float = 0.0

    def __call__(self, live: Live) -> None:
        live.until(self.at)
        pidfd = os.pidfd_open(live.pids()[self.rank])
        try:
            live.now()
            signal.pidfd_send_signal(pidfd, self.number)
            if self.cont_s:
                time.sleep(self.cont_s)
                with suppress(ProcessLookupError):  # it has been replaced by then
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        finally:
            os.close(pidfd)


@dataclass(frozen=True)
class Told:
    """The command gets one signal after the other, ``apart_s`` seconds apart, after step ``at``."""

    numbers: tuple[signal.Signals, ...]
    at: int
    apart_s: float = 0.3

    def __call__(self, live: Live) -> None:
        live.until(self.at)
        for place, number in enumerate(self.numbers):
            if place:
                time.sleep(self.apart_s)
            live.send(number)


@dataclass(frozen=True)
class AllKilled:
    """All ranks at once after step ``at``."""

    at: int

    def __call__(self, live: Live) -> None:
        live.until(self.at)
        pids = live.pids().values()
        live.now()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Restarted:
    """A rank is killed after step ``at`` under a launcher that restarts all; how long until the next step."""

    at: int

    def __call__(self, live: Live) -> None:
        live.until(self.at)
        before = live.step()
        pid = live.send_rank(1, signal.SIGKILL)
        live.wait(lambda: pid not in live.pids().values() and live.step() > before)
        live.notes["total_s"] = (time.monotonic_ns() - live.moments[0]) / 1e9


@dataclass(frozen=True)
class Listens:
    """Who listens for connections after step ``at``: nobody should."""

    at: int

    def __call__(self, live: Live) -> None:
        live.until(self.at)
        if found := listening(live.mark):
            live.notes["problem"] = f"it listens on {', '.join(found)}"


@dataclass(frozen=True)
class Inside:
    """``instep`` with hooks in it: see ``inside``."""

    hooks: tuple[str, ...]

    def __call__(self, words: list[str], corner: Path) -> list[str]:
        assert words[: len(INSTEP)] == INSTEP
        start = [sys.executable, "-m", "benchmarks.faults.inside", *self.hooks, "--"]
        return [*start, *words[len(INSTEP) :]]


@dataclass(frozen=True)
class SmallDisk:
    """The run directory is on a disk of so many KiB, which only the command sees, and which ends with it."""

    size_kib: int

    def __call__(self, words: list[str], corner: Path) -> list[str]:
        (corner / "mnt").mkdir(exist_ok=True)
        script = ["sh", "-c", MOUNTED.replace("$OLDPWD", str(corner)), "sh"]
        moved = [str(corner / "mnt" / "run") if word == str(corner / "run") else word for word in words]
        return [*namespace(), *script, f"{self.size_kib}k", str(corner / "mnt"), *moved]


@dataclass(frozen=True)
class ReadOnly:
    """``what`` in the run directory cannot be written to."""

    what: str = "."

    def __call__(self, words: list[str], corner: Path) -> list[str]:
        return [*namespace(), "sh", "-c", BOUND, "sh", str(corner / "run" / self.what), *words]


def namespace() -> list[str]:
    """What makes mounts of its own for the command after it."""
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


def torchrun(words: list[str], corner: Path) -> list[str]:
    """Two ranks that torchrun starts, and starts again."""
    return [*TORCHRUN, "--nproc-per-node", "2", *words[1:]]


def newest(run_dir: Path) -> Path:
    """The newest checkpoint."""
    return files.step_directories(run_dir / CHECKPOINTS)[0][1]


def truncated(name: str) -> Damage:
    """File ``name`` of the newest checkpoint loses its second half."""
    return lambda run_dir: os.truncate(newest(run_dir) / name, os.path.getsize(newest(run_dir) / name) // 2)


def flipped(name: str) -> Damage:
    """A bit in the middle of file ``name`` of the newest checkpoint is another."""

    def damage(run_dir: Path) -> None:
        path = newest(run_dir) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def missing(name: str) -> Damage:
    """File ``name`` of the newest checkpoint is gone."""
    return lambda run_dir: (newest(run_dir) / name).unlink()


def all_flipped(run_dir: Path) -> None:
    """Every checkpoint has a file with another bit."""
    for _, path in files.step_directories(run_dir / CHECKPOINTS):
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "model.safetensors").write_bytes(data)


def stale(run_dir: Path) -> None:
    """A writer has died in the middle of the newest checkpoint."""
    path = newest(run_dir)
    there = shutil.copytree(path, path.with_name(f".{path.name}.tmp-{'0' * 16}"))
    os.truncate(there / "model.safetensors", 100)
    shutil.rmtree(path)
