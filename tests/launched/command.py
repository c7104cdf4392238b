"""The command as a process of its own: what it said, how it ended, and that no process outlived it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from instep.record.directory import FAULTS, RECORD, SUMMARY, WORKERS
from instep.record.jsonl import read_lines

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100  # below what pytest grants: a busy machine is slow
LIMIT_BYTES = 1 << 20
MARK = "INSTEP_TEST"
INSTEP = (sys.executable, "-m", "instep")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "-m")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines in which ``instep train`` says why it ends."""
        return [line for line in self.err.splitlines() if line.startswith("instep train: ")]

    def assert_failed(self, code: int, line: str) -> None:
        """It ended with ``code``, and one rank said so in one line, the last, that has ``line`` in it."""
        assert self.code == code, self.err
        assert len(self.errors) == 1, self.err
        assert line in self.errors[0]
        assert "Traceback" not in self.err
        assert self.out == ""


def run(*command: object, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` in ``cwd`` to its end."""
    with started(*command, cwd=cwd, env=env) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def train(*args: object, cwd: Path) -> Ended:
    """``instep train`` with ``args``, started warm."""
    return instep("train", *args, cwd=cwd)


def instep(*words: object, cwd: Path, first: str = "", timeout: float = PATIENCE_S) -> Ended:
    """``instep`` with ``words``, started warm: see ``ember``."""
    with started_warm(*words, cwd=cwd, first=first) as command:
        out, err = command.communicate(timeout)
    assert command.returncode is not None
    return Ended(command.returncode, out, err)


@contextmanager
def started_warm(
    *words: object, cwd: Path, env: Mapping[str, str] | None = None, host: str = "", first: str = ""
) -> Iterator[Warm]:
    """``instep`` with ``words`` while it runs, started warm; in the end no process of it may be left.

    Args:
        env: added to this process's environment.
        host: the name of one of ``tests.lab``, if it is not to run on this one.
        first: code that the command runs before all of its own.
    """
    if not _embers:
        _embers.append(_Ember())
    environ = {**os.environ, **(env or {}), "PYTHONPATH": str(ROOT)}
    request = {"words": [*map(str, words)], "cwd": str(cwd), "env": environ, "host": host, "first": first}
    try:
        with _embers[0].start(request) as command:
            yield command
    except BaseException:
        put_out()
        raise


def put_out() -> None:
    """End the process that commands are forked from, and them with it."""
    while _embers:
        _embers.pop().end()


@dataclass
class Warm:
    """A command that was started warm: of what ``subprocess.Popen`` is to others, as much as tests need."""

    stdout: IO[bytes]
    stderr: IO[str]
    answers: IO[bytes]
    pid: int
    returncode: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """What it has said on both streams, once it has ended; on stderr, what has not been read yet."""
        if not select.select([self.answers], [], [], timeout)[0]:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"it did not end within {timeout} s:\n{self.stderr.read()}")
        ended = json.loads(self.answers.readline())
        assert not ended["left"], f"processes left behind: {ended['left']}"
        self.returncode = ended["code"]
        return os.pread(self.stdout.fileno(), LIMIT_BYTES, 0).decode(), self.stderr.read()


class _Ember:
    """The process that holds torch, and the socket that it is asked by."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.launched.ember", str(theirs.fileno())],
                cwd=ROOT,
                # No threads before it forks: numpy's BLAS starts some at its import.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    @contextmanager
    def start(self, request: Mapping[str, object]) -> Iterator[Warm]:
        answer, answering = os.pipe()
        error, erring = os.pipe()
        with TemporaryFile() as out, open(answer, "rb", 0) as answers, open(error) as err:
            streams = [out.fileno(), erring, answering]
            socket.send_fds(self.socket, [json.dumps(request).encode()], streams)
            os.close(erring)
            os.close(answering)
            begun = answers.readline() if select.select([answers], [], [], PATIENCE_S)[0] else b""
            assert begun, f"the process that commands are forked from gives no answer: {self.process.poll()}"
            command = Warm(out, err, answers, int(begun))
            try:
                yield command
            finally:
                if command.returncode is None:
                    with suppress(ProcessLookupError):  # it did not end in time, and was killed
                        command.send_signal(signal.SIGKILL)
                    command.communicate()

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


_embers: list[_Ember] = []


@contextmanager
def started(
    *command: object, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``command`` while it runs, in a process group of its own; in the end no process of it may be left."""
    mark = secrets.token_hex(8)
    paths = [*filter(None, [(env or {}).get("PYTHONPATH")]), str(ROOT)]
    environ = {**os.environ, **(env or {}), MARK: mark, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            left = list(outliving(mark))
            assert not left, f"processes left behind: {left}"


def outliving(mark: str) -> Iterator[int]:
    """Processes with ``mark`` in their environment, inherited by every one of a command, that do not end."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ends just now, or is a stranger's
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                pid = int(environ.parent.name)
                pidfd = os.pidfd_open(pid)
                with open(pidfd):
                    if not select.select([pidfd], [], [], 10)[0]:
                        yield pid


def read_until(process: subprocess.Popen[str] | Warm, text: str) -> str:
    """What ``process`` says on stderr up to and with the first line that has ``text`` in it."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without saying {text!r}:\n{said}")


def tree(path: Path) -> dict[str, bytes | None]:
    """Every file below ``path`` with its bytes, and every directory."""
    return {str(at): at.read_bytes() if at.is_file() else None for at in path.rglob("*")}


def steps_of(run_dir: Path) -> list[dict[str, object]]:
    """The lines of steps, without their times."""
    lines = [line for line in read_lines(run_dir / RECORD) if "cursor" in line]
    return [{name: line.get(name) for name in ("step", "cursor", "loss", "norm")} for line in lines]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / SUMMARY).read_text())


def faults(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--fault", spec)]


def events(run_dir: Path, event: str, file: str = FAULTS) -> list[dict[str, Any]]:
    path = run_dir / file
    return [line for line in read_lines(path) if line.get("event") == event] if path.exists() else []


def hashes_of(run_dir: Path) -> dict[int, tuple[Any, ...]]:
    """By step, the hashes of the state after it."""
    lines = [line for line in read_lines(run_dir / RECORD) if "cursor" in line]
    return {line["step"]: tuple(map(line.get, ("sampled", "state_sha256", "entries"))) for line in lines}


def assert_same_run(run_dir: Path, reference: Path, global_size: int = 16) -> None:
    """The same steps, each once, from data that nobody else has read, to the same weights and moments; on the
    way there equal losses, gradients and samples of the state."""
    for field in ("state_sha256", "fingerprint", "loss_first", "loss_last", "held_out_loss"):
        assert summary(run_dir)[field] == summary(reference)[field], field
    lines = steps_of(run_dir)
    assert lines == steps_of(reference)
    assert [(line["step"], line["cursor"]) for line in lines] == [
        (step, (step + 1) * global_size) for step in range(len(lines))
    ]
    ours, theirs = hashes_of(run_dir), hashes_of(reference)
    assert ours.keys() == theirs.keys()
    for step, (sampled, whole, entries) in ours.items():
        assert sampled == theirs[step][0]
        assert None in (whole, theirs[step][1]) or (whole, entries) == theirs[step][1:]  # hashed in both
    assert not (run_dir / WORKERS).exists()
