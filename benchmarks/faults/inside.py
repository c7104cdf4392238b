"""``instep`` with something changed inside of it, in the command, in its ranks, or in both.

    python -m benchmarks.faults.inside HOOK[=VALUE] ... -- train -n 2 ...

A rank is a new process that imports the main module, this one, before it is told what to do. That is where a
hook gets into it: what it does takes effect when the rank begins to work, after its start, during which
multiprocessing unpickles what the command has sent. That is the one place where bytes may be unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import instep.launch.rank_process
import instep.run.script
from benchmarks.faults.command import MOMENT
from instep.cli.main import main
from instep.run.recovery import Snapshots
from instep.run.script_training import ScriptTraining
from tests.checkpoint.no_pickle import forbid

DAY_S = 86_400.0
COPIES = "copies.jsonl"


def no_pickle(value: str) -> None:
    """Whoever unpickles is caught."""
    forbid()


def unpickle(value: str) -> None:
    """Do it, to see that it is caught."""
    pickle.loads(pickle.dumps(value))


def clock(value: str) -> None:
    """The wall clock jumps by up to a day, back and forth, each time that it is looked at."""
    real, jump = time.time, random.Random(value)
    time.time = lambda: real() + jump.uniform(-DAY_S, DAY_S)
    time.time_ns = lambda: int(1e9 * time.time())


def disk(value: str) -> None:
    """``EIO:fsync:7``: every ``fsync`` from the seventh on raises it, as on a disk that has failed."""
    name, operation, first = value.split(":")
    code, real, left = getattr(errno, name), getattr(os, operation), [int(first)]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    # Of the standard library by its name: a real one has no frame, and would not be taken for a script's own.
    known = {**globals(), "__name__": "os"}
    setattr(os, operation, FunctionType(broken.__code__, known, operation, None, broken.__closure__))


def kill_at(value: str) -> None:
    """``rename:2``: the process is killed at its second ``rename``, by which a checkpoint would be there."""
    operation, number = value.split(":")
    real, left = getattr(os, operation), [int(number)]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and _once(operation):
            MOMENT.write_text(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, operation, deadly)


def _once(name: str) -> bool:
    """Whether no process of this run has been here before."""
    try:
        Path(f"once-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def copies(value: str) -> None:
    """Write down what each snapshot takes: a line per step of rank 0, times in ns.

    With ``value``, every second block of so many steps goes without copies.
    """
    block, real = int(value or 0), Snapshots.after_step
    lines: list[str] = []

    def timed(self: Snapshots, training: ScriptTraining, step_s: float) -> None:
        step, began = training.steps_done, time.monotonic_ns()
        pause = bool(block) and step // block % 2 == 1
        copied = not pause and self._interval.due(step)
        if not pause:
            real(self, training, step_s)
        if not training.mesh.rank:
            ended = time.monotonic_ns()
            found = {"step": step, "copied": copied, "on": not pause, "copy_ns": ended - began, "ns": ended}
            lines.append(json.dumps(found))
            if step == training.config.steps:
                Path(COPIES).write_text("\n".join(lines) + "\n")

    Snapshots.after_step = timed  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[str], None]] = {
    "no-pickle": no_pickle,
    "unpickle": unpickle,
    "clock": clock,
    "disk": disk,
    "kill-at": kill_at,
    "copies": copies,
}
IN_THE_COMMAND = frozenset({"no-pickle", "clock"})


def parse(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The hooks with their values, and the words of the command."""
    at = words.index("--")
    return [(name, value) for name, _, value in (word.partition("=") for word in words[:at])], words[at + 1 :]


def live(*args: Any) -> None:
    """A rank's life, with the hooks in place."""
    for name, value in parse(sys.argv[1:])[0]:
        HOOKS[name](value)
    _live(*args)


_live = instep.launch.rank_process.run_child
if __name__ == "__mp_main__":  # as multiprocessing calls the main module in a process that it has started
    instep.launch.rank_process.run_child = live

if __name__ == "__main__":
    hooks, rest = parse(sys.argv[1:])
    for name, value in hooks:
        if name in IN_THE_COMMAND:
            HOOKS[name](value)
    sys.exit(main(rest))
