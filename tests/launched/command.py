"""The command as a process of its own: what it said, how it ended, and that no process outlived it."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from instep.train.folder import LEDGER, read_lines

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
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


def train(*args: object, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """``instep train`` with ``args``."""
    return run(*INSTEP, "train", *args, cwd=cwd, env=env)


@contextmanager
def started(
    *command: object, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``command`` while it runs, in a process group of its own; in the end no process of it may be left."""
    mark = secrets.token_hex(8)
    paths = [*filter(None, [(env or {}).get("PYTHONPATH")]), str(ROOT)]
    environ = {**os.environ, **(env or {}), MARK: mark, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with process:
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


def read_until(process: subprocess.Popen[str], text: str) -> str:
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
    """The ledger's lines that stand for steps, without where they were made."""
    lines = [line for line in read_lines(run_dir / LEDGER) if "cursor" in line]
    return [{name: line[name] for name in ("step", "cursor", "loss", "grad_norm")} for line in lines]
