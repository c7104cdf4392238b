"""Warm processes for tests: a world of ranks that runs one test body after another.

There is one pool per world size and backend. Its processes come from instep's own launcher; a test costs a
message to each, a default group and a mesh. A pool in which anything failed is thrown away, because its
ranks may be out of step with each other.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.launch.launch import launch, warm
from instep.launch.launch_environment import LaunchEnvironment, detect
from instep.launch.rank_exit import RankFailed
from instep.mesh.mesh import build
from instep.net.process_group import default_store
from instep.net.store import backend_timeout

REPLY_LIMIT_BYTES = 1 << 16
JOIN_S = 10
IMPORT_S = 60


@dataclass(frozen=True)
class Job:
    """A test body, by name, and what to call it with."""

    module: str
    name: str
    params: dict[str, Any]
    axes: dict[str, int]
    timeout_s: float


_pools: dict[tuple[int, str], Pool] = {}


def run_in_pool(size: int, backend: str, job: Job, deadline_s: float) -> None:
    """Run ``job`` on all ranks of the pool, which is started if there is none.

    Raises:
        RankFailed: a rank raised or died; the rank's traceback is a note of the error.
        TimeoutError: the deadline passed; the message has every rank's stack.
    """
    __tracebackhide__ = True
    key = size, backend
    if key not in _pools:
        _pools[key] = Pool(size, backend)
    try:
        skip = _pools[key].run(job, deadline_s)
    except BaseException:
        _pools.pop(key).kill()
        raise
    if skip:
        pytest.skip(skip)


def shut_down() -> None:
    """End all pools."""
    while _pools:
        _pools.popitem()[1].close()


def pids() -> set[int]:
    """The processes of all pools."""
    return {pid for pool in _pools.values() for pid in pool.pids}


class Pool:
    """One world: ``launch`` runs in a thread here while its ranks ``_serve``, each at the end of a pipe."""

    def __init__(self, size: int, backend: str) -> None:
        warm("pytest")
        pairs = [multiprocessing.Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._stacks = tempfile.TemporaryDirectory(prefix="instep-pool-")
        self._pidfds: list[int] = []
        self._failure: BaseException | None = None
        self.pids: list[int] = []
        up = threading.Event()
        self._launcher = threading.Thread(target=self._launch, args=(size, backend, up), daemon=True)
        self._launcher.start()
        up.wait()

    def run(self, job: Job, deadline_s: float) -> str:
        """Have every rank do ``job``; the answer is the reason if they skipped it."""
        __tracebackhide__ = True
        for connection in self._ours:
            with suppress(OSError):  # a rank that is gone shows below
                connection.send(job)
        waiting, skip = list(self._ours), ""
        until = time.monotonic() + deadline_s
        while waiting:
            ready = wait(waiting, max(0, until - time.monotonic()))
            if not ready:
                late = ", ".join(str(self._ours.index(connection)) for connection in waiting)
                raise self._timed_out(f"rank {late} of {len(self._ours)} did not end within {deadline_s:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                waiting.remove(connection)
                try:
                    skip = connection.recv_bytes(REPLY_LIMIT_BYTES).decode() or skip
                except (OSError, EOFError):
                    raise self._lost() from None
        return skip

    def close(self) -> None:
        """Let the ranks go home; they wait for a job."""
        for connection in self._ours:
            connection.close()
        self._launcher.join(JOIN_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks, whatever they do, and give back what the pool has."""
        self._signal(signal.SIGKILL)
        self._launcher.join(JOIN_S)
        for connection in self._ours:
            connection.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        self._stacks.cleanup()

    def _launch(self, size: int, backend: str, up: threading.Event) -> None:
        def started(pids: list[int]) -> None:
            self.pids = pids
            self._pidfds = [os.pidfd_open(pid) for pid in pids]
            self._hang_up()
            up.set()

        try:
            launch(_serve, (self._theirs, backend, self._stacks.name), ranks=size, on_start=started)
        except BaseException as error:
            self._failure = error
        finally:
            self._hang_up()
            up.set()

    def _hang_up(self) -> None:
        """Close the ranks' ends here, so that a rank that ends is the end of its pipe."""
        for connection in self._theirs:
            connection.close()

    def _lost(self) -> BaseException:
        """A rank ended in the middle: the launcher knows why, once it has ended the others."""
        self._launcher.join(JOIN_S)
        if not isinstance(self._failure, RankFailed):
            return self._failure or RuntimeError("a rank ended with exit code 0 in the middle of a test")
        self._failure.add_note(self._failure.rank_traceback or self._read_stacks())
        return self._failure.with_traceback(None)  # the launcher's frames say nothing about the test

    def _timed_out(self, message: str) -> TimeoutError:
        # faulthandler writes all stacks of a process that aborts, also when it hangs in native code.
        self._signal(signal.SIGABRT)
        self._launcher.join(JOIN_S)
        return TimeoutError(f"{message}\n{self._read_stacks()}")

    def _read_stacks(self) -> str:
        paths = sorted(Path(self._stacks.name).iterdir())
        return "\n".join(f"stack of rank {path.name}:\n{path.read_text()}" for path in paths)

    def _signal(self, number: signal.Signals) -> None:
        for pidfd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)


def _serve(connections: list[Connection], backend: str, stacks: str) -> None:
    """A rank's life in a pool: until its pipe ends, or a body raises."""
    place = detect(os.environ)
    jobs = connections[place.rank]
    for connection in connections:
        if connection is not jobs:
            connection.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(Path(stacks) / str(place.rank), "w") as file:
        faulthandler.enable(file)
        assert place.store_file is not None
        store = dist.FileStore(place.store_file, place.world_size)
        for number in count():
            try:
                job = jobs.recv()
            except EOFError:
                return
            # torch gives a new group the name of one that was destroyed: it must not read that one's keys.
            reply = _perform(job, place, dist.PrefixStore(str(number), store), backend)
            jobs.send_bytes(reply.encode())


def _perform(job: Job, place: LaunchEnvironment, store: dist.Store, backend: str) -> str:
    body = inspect.unwrap(getattr(importlib.import_module(job.module), job.name))
    # Imports take longer than a deadline where the machine is busy, and not as long on each rank.
    store.set(f"imported on {place.rank}", "")
    store.wait([f"imported on {rank}" for rank in range(place.world_size)], timedelta(seconds=IMPORT_S))
    torch.manual_seed(0)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=backend_timeout(job.timeout_s),
    )
    mesh = build(default_store(), place.rank, place.world_size, timeout_s=job.timeout_s, **job.axes)
    skip = ""
    try:
        body(mesh, **job.params)
    except pytest.skip.Exception as reason:
        skip = str(reason) or "skipped"
    # Not after an error: closing could wait for a peer, and this rank's end is what the others wait for.
    mesh.close()
    dist.destroy_process_group()
    return skip
