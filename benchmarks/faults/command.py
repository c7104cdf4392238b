"""A command that something happens to: started in a corner of its own, watched, and what is left of it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.record.directory import RECORD, WORKERS
from instep.record.jsonl import read_lines

ROOT = Path(__file__).parents[2]
MARK = "INSTEP_FAULTS"  # in the environment, which every process of a command inherits
MOMENT = Path("moment")  # where whoever makes a fault inside of a command writes when it was (ns)
PATIENCE_S = 180.0
LEAVE_S = 10.0  # for the last process of a command that has ended to be gone
LOOK_S = 0.004
TAIL_BYTES = 1 << 16
SHARED = Path("/dev/shm")
TORCHS_OWN = "torchinductor_"  # a cache that importing torch._dynamo makes, and torch.optim imports that
LISTENING = "0A"  # in /proc/net/tcp


class HasEnded(Exception):
    """The command ended before what should happen to it could happen."""


@dataclass
class Live:
    """A command while it runs; ``moments`` are when something was done to it (``time.monotonic_ns()``)."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    mark: str
    moments: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def now(self) -> None:
        """What is done next is the fault."""
        self.moments.append(time.monotonic_ns())

    def send(self, number: signal.Signals) -> None:
        """To the command."""
        self.now()
        self.process.send_signal(number)

    def send_rank(self, rank: int, number: signal.Signals, *, is_fault: bool = True) -> int:
        """To a rank, whose pid is returned; ``ProcessLookupError`` if it is gone."""
        pid = self.pids()[rank]
        if is_fault:
            self.now()
        os.kill(pid, number)
        return pid

    def pids(self) -> dict[int, int]:
        """Rank to pid; empty before the ranks have met."""
        try:
            found = json.loads((self.run_dir / WORKERS).read_text())
        except (OSError, ValueError):
            return {}
        return {int(rank): peer["pid"] for rank, peer in found.items()}

    def step(self) -> int:
        """How many steps are recorded."""
        return last_step(self.run_dir)

    def wait(self, holds: Callable[[], bool]) -> None:
        """Until ``holds()``; ``HasEnded`` if the command ends before, ``TimeoutError`` if neither happens."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if self.process.poll() is not None:
                raise HasEnded(f"with code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(LOOK_S)

    def until(self, step: int) -> None:
        """Until ``step`` steps are recorded."""
        self.wait(lambda: self.step() >= step)


@dataclass(frozen=True)
class Ended:
    """A command that has ended; ``left`` is what it has left behind, of which there should be nothing."""

    code: int
    said: str
    moments: list[int]
    notes: dict[str, Any]
    left: list[str]


def last_step(run_dir: Path) -> int:
    """How many steps the run in ``run_dir`` has made."""
    with suppress(OSError), (run_dir / RECORD).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):
                found = json.loads(line)
                if "cursor" in found:
                    return int(found["step"]) + 1
    return 0


def run(
    words: Sequence[str],
    corner: Path,
    run_dir: Path,
    *,
    act: Callable[[Live], None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``words`` in ``corner``, a directory of its own, to the end, while ``act`` happens to it."""
    mark = secrets.token_hex(8)
    temporary = corner / "tmp"
    temporary.mkdir(exist_ok=True)
    before = set(_shared())
    environ = {
        **os.environ,
        **(environ or {}),
        MARK: mark,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
    }
    log = corner / "said"
    with log.open("wb") as said:
        process = subprocess.Popen(
            words,
            cwd=corner,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        )
        live = Live(process, run_dir, mark)
        try:
            _happen(live, act)
        finally:
            process.kill()
            process.wait()
            left = list(leftovers(mark, temporary, run_dir, before))
    with suppress(FileNotFoundError):
        live.moments.append(int((corner / MOMENT).read_text()))
        (corner / MOMENT).unlink()
    return Ended(process.returncode, log.read_text(errors="replace"), live.moments, live.notes, left)


def _happen(live: Live, act: Callable[[Live], None] | None) -> None:
    try:
        if act is not None:
            act(live)
        live.process.wait(PATIENCE_S)
    except HasEnded as ended:
        live.notes["problem"] = f"it ended before the fault, {ended}"
    except (TimeoutError, subprocess.TimeoutExpired):
        live.notes["problem"] = f"it did not end within {PATIENCE_S:g} s"


def leftovers(mark: str, temporary: Path, run_dir: Path, shared: set[str]) -> Iterator[str]:
    """Processes with ``mark``, which are ended; temporary files; what is new in /dev/shm."""
    deadline = time.monotonic() + LEAVE_S
    for pid in marked(mark):
        with suppress(ProcessLookupError), open(os.pidfd_open(pid)) as pidfd:
            if not select.select([pidfd], [], [], max(0, deadline - time.monotonic()))[0]:
                yield f"process {pid}"
                os.kill(pid, signal.SIGKILL)
    for path in temporary.iterdir():
        if not path.name.startswith(TORCHS_OWN):
            yield f"temporary {path.name}"
    yield from (f"unfinished {path.name}" for path in run_dir.rglob(".*"))
    yield from (f"/dev/shm/{name}" for name in set(_shared()) - shared if not _gone(SHARED / name, deadline))


def marked(mark: str) -> list[int]:
    """The processes with ``mark`` in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ends just now, or is a stranger's
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def listening(mark: str) -> list[str]:
    """The addresses, in hexadecimal, on which processes with ``mark`` listen for TCP connections."""
    sockets = set()
    for pid in marked(mark):
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(link))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and f"socket:[{words[9]}]" in sockets:
                    found.append(words[1])
    return found


def _shared() -> list[str]:
    return os.listdir(SHARED) if SHARED.is_dir() else []


def _gone(path: Path, deadline: float) -> bool:
    """Whether ``path`` is gone at the latest at ``deadline``: others may use the same directory."""
    while path.exists() and time.monotonic() < deadline:
        time.sleep(10 * LOOK_S)
    return not path.exists()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of steps."""
    return [line for line in read_lines(run_dir / RECORD) if "cursor" in line]


def worlds_of(run_dir: Path) -> Iterator[int]:
    """How many ranks made each step, as the lines before it say where the run began or moved."""
    world_size = 0
    for line in read_lines(run_dir / RECORD):
        world_size = line.get("world_size", world_size)
        if "cursor" in line:
            yield world_size
