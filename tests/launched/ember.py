"""Commands that start warm: forks of a process that holds torch, as a rank is a fork of one that does.

Nearly all the time of a short run goes into importing torch, which a command does twice: itself and in its
forkserver. Here it is done once, for all commands of the tests:

    tests ── socket ──> ember            holds torch; ends when the socket does
                          └─ keeper      one per command: what a command leaves behind becomes its child
                               └─ command                   as ``python -m instep`` runs it
                                    └─ forkserver ─ ranks   the former a fork too, not a new interpreter

What this cannot show is how an interpreter starts, and how it takes apart what it holds: a few tests start a
new one, with an environment of its own, under torchrun, or to be interrupted as from a terminal.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from instep.launch.launch import PRELOAD
from tests.lab import enter

REQUEST_LIMIT_BYTES = 1 << 16
PATIENCE_S = 30
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
COMMANDS = (
    "instep.run.start",
    "instep.run.run",
    "instep.checkpoint.shorthand",
    "instep.recipes.text",
    "rich._emoji_codes",
    *(f"instep.cli.{word}" for word in ("train", "run", "report", "compare")),
)


def serve(requests: socket.socket) -> None:
    """Fork a keeper for each request, until the other end is closed; in the command this returns, too."""
    for module in (*PRELOAD, *COMMANDS):
        importlib.import_module(module)
    # At its end every command would take apart each operator that torch has made, and so copy what it shares.
    for library in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        library.atexit = False
    gc.freeze()  # or a fork that ends looks at, and so copies, all that it shares: a second for torch
    if "triton" in sys.modules:  # which then says in thirty lines what was not collected
        atexit.register(gc.unfreeze)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need nobody to wait for them
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_LIMIT_BYTES, 3)
        if not request:
            return
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keep(json.loads(request), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def keep(request: dict[str, Any], out: int, err: int, answer: int) -> None:
    """Fork the command and tell its id, wait for it and for what it leaves behind, tell how both ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = os.fork()
    if not command:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        become(request, out, err)
        return
    os.write(answer, f"{command}\n".encode())
    for stream in (out, err):
        os.close(stream)  # who reads them waits for their end
    _, status = os.waitpid(command, 0)
    ended = {"code": os.waitstatus_to_exitcode(status), "left": bury_orphans()}
    os.write(answer, json.dumps(ended).encode())
    os._exit(0)


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Be the command from here on: its process group, streams, host, directory, environment and words."""
    os.setpgid(0, 0)
    if request["host"]:
        enter(request["host"])
    with open(os.devnull) as nothing:
        for number, stream in enumerate((nothing.fileno(), out, err)):
            os.dup2(stream, number)
    close_all_but(0, 1, 2)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # torch has looked for it, by another TMPDIR
    sys.argv = ["", *request["words"]]
    multiprocessing.util.spawnv_passfds = fork_instead  # type: ignore[attr-defined]
    exec(request["first"], {})
    try:
        runpy.run_module("instep", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        end_with(end.code)


def end_with(code: object) -> NoReturn:
    """What an interpreter does at its end, but for taking apart what it holds: 0.3 s where that is torch."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def fork_instead(path: bytes, args: Sequence[str], kept: Sequence[int]) -> int:
    """What multiprocessing starts by ``python -c CODE``, its forkserver: the same code in a fork of this."""
    if pid := os.fork():
        return pid
    try:
        close_all_but(0, 1, 2, *kept)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # as exec leaves it
                signal.signal(number, signal.SIG_DFL)
        exec(args[-1], {"__name__": "__main__"})
    except BaseException as end:
        if not isinstance(end, SystemExit):
            traceback.print_exc()
    finally:
        os._exit(0)  # not into the frames of the command


def close_all_but(*kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # the one that listed them
                os.close(descriptor)


def bury_orphans() -> list[int]:
    """Wait for the processes that have become our children; end, and name, those that do not."""
    left = []
    until = time.monotonic() + PATIENCE_S
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        pid = int(children[0])
        with open(os.pidfd_open(pid)) as pidfd:
            if not select.select([pidfd], [], [], max(0, until - time.monotonic()))[0]:
                left.append(pid)
                os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return left


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
