"""Worlds for tests: ``@world(4)`` runs a test's body on four ranks, as threads or as warm processes.

    @world(4)
    @pytest.mark.parametrize("length", [1, 7])
    def test_every_rank_receives_all(mesh, length): ...

Every rank calls the body with its own ``mesh``, which pytest does not see; what pytest passes (parameters,
fixtures) is the same object for all. The body must be a function of a module.

Threads are the default: they take some 50 ms, a debugger works, and pytest explains a failed assertion.
They share what a process has one of: torch's default generator, the environment, the default group, the
fate of a killed rank. A test of those says ``by="process"``.

When ranks fail, the error that is raised is that of the rank that explains the others.
"""

from __future__ import annotations

import functools
import inspect
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.launch.rank_exit import ErrorRecord, Exit, root_cause
from instep.mesh.mesh import Mesh, build
from instep.net.hang_report import running_frames
from instep.net.process_group import MakeGroup
from instep.net.store import backend_timeout
from instep.shm import connect
from tests.pool import Job, run_in_pool


def world(
    size: int,
    *,
    by: str = "thread",
    backend: str = "gloo",
    timeout_s: float = 20.0,
    deadline_s: float = 60.0,
    **axes: int,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated body on ``size`` ranks at once.

    Args:
        by: "thread" or "process".
        backend: "gloo" or "shm"; of the processes' default group, or of the threads' groups.
        timeout_s: of the mesh, the deadline of every wait in the body.
        deadline_s: of the whole test; past it every rank's stack is shown.
        axes: sizes for ``build``, e.g. ``dp=2, tp=2``.
    """
    if by not in ("thread", "process"):
        raise ValueError(f"expected by='thread' or by='process', got {by!r}")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        first, *others = signature.parameters.values()
        if first.name != "mesh":
            raise TypeError(f"expected mesh as the first parameter of {body.__name__}, got {first.name}")

        @functools.wraps(body)
        def test(**params: Any) -> None:
            __tracebackhide__ = True
            if by == "thread":
                _Threads(size, backend, timeout_s, axes).run(body, params, deadline_s)
            else:
                job = Job(body.__module__, body.__qualname__, params, axes, timeout_s)
                run_in_pool(size, backend, job, deadline_s)

        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return test

    return decorate


@dataclass
class _End:
    """How a rank's thread ended."""

    rank: int
    error: BaseException | None = None
    record: ErrorRecord | None = None
    where: str = ""  # coordinates, once the rank has a mesh


@dataclass
class _Threads:
    """A world of threads that lives for one test."""

    size: int
    backend: str
    timeout_s: float
    axes: dict[str, int]
    store: dist.Store = field(default_factory=dist.HashStore)
    ends: queue.Queue[_End] = field(default_factory=queue.Queue)

    def run(self, body: Callable[..., None], params: dict[str, Any], deadline_s: float) -> None:
        __tracebackhide__ = True
        self.store.set_timeout(timedelta(seconds=self.timeout_s))
        threads = [
            threading.Thread(target=self._live, args=(rank, body, params), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        ended = self._collect(deadline_s)
        for rank in ended:
            threads[rank].join()
        failures = [end for end in ended.values() if end.error is not None]
        stuck = {rank: thread for rank, thread in enumerate(threads) if rank not in ended}
        stacks = "\n".join(f"stack of rank {rank} of {self.size}:\n{_stack(t)}" for rank, t in stuck.items())
        if failures:
            raise self._explain(failures, stacks)
        if stuck:
            ranks = ", ".join(map(str, stuck))
            raise TimeoutError(f"rank {ranks} of {self.size} did not end within {deadline_s:g} s\n{stacks}")

    def _live(self, rank: int, body: Callable[..., None], params: dict[str, Any]) -> None:
        end = _End(rank)
        torch.get_num_threads()  # a new thread takes one per core until it is asked; convolutions round by it
        try:
            mesh = self._mesh(rank)
            end.where = ", ".join(f"{axis}={at}" for axis, at in mesh.coordinates.items())
            try:
                body(mesh, **params)
            finally:
                mesh.close()
        except BaseException as error:  # also pytest's own, such as skip
            end.error, end.record = error, ErrorRecord.of(error)
        self.ends.put(end)

    def _mesh(self, rank: int) -> Mesh:
        make = raw_groups(self.backend, self.store, rank, backend_timeout(self.timeout_s))
        return build(self.store, rank, self.size, timeout_s=self.timeout_s, make_group=make, **self.axes)

    def _collect(self, deadline_s: float) -> dict[int, _End]:
        """The ranks that ended in time. After a failure the others have what a wait of the mesh may take."""
        until = time.monotonic() + deadline_s
        ended: dict[int, _End] = {}
        while len(ended) < self.size:
            try:
                end = self.ends.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                break
            ended[end.rank] = end
            if end.error is not None:
                until = min(until, time.monotonic() + 2 * self.timeout_s + 1)
        return ended

    def _explain(self, failures: list[_End], stacks: str) -> BaseException:
        """The error to raise, with notes that say whose it is and how the other ranks fared."""
        cause = root_cause([Exit(end.rank, 0, 1, end.record) for end in failures])
        assert cause is not None
        blamed = next(end for end in failures if end.rank == cause.rank)
        assert blamed.error is not None
        blamed.error.add_note(f"in rank {blamed.rank} of {self.size} ({blamed.where or 'no mesh yet'})")
        for end in failures:
            if end is not blamed and end.record is not None:
                blamed.error.add_note(f"rank {end.rank} too: {end.record.type}: {end.record.message}")
        if stacks:
            blamed.error.add_note(stacks)
        return blamed.error


def raw_groups(backend: str, store: dist.Store, rank: int, timeout: timedelta) -> MakeGroup:
    """Groups for one thread, without the default group that a process can have only one of."""
    made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def make(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        key = name, tuple(ranks)
        prefix = dist.PrefixStore(f"{key}/{made[key]}", store)
        made[key] += 1
        if backend == "shm":
            group = connect(prefix, ranks.index(rank), len(ranks), timeout, ranks)
            assert isinstance(group, dist.ProcessGroup), "the ranks of a test share a host"
            return group
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [_loopback()]
        at, size = ranks.index(rank), len(ranks)
        pg = dist.ProcessGroup(prefix, at, size)
        gloo = dist.ProcessGroupGloo(prefix, at, size, options)
        pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        prefix.set(f"made/{at}", "")
        prefix.wait(
            [f"made/{i}" for i in range(size)]
        )  # a rank that closes it now would fail the others' call
        return pg

    return make


@functools.cache
def _loopback() -> dist.ProcessGroupGloo.Device:
    """For all groups of this process: each device has a thread of its own."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def _stack(thread: threading.Thread) -> str:
    frame = running_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "  it has just ended\n"
