"""``instep.trace``: the breakdown of any training loop that uses ``DataParallel``.

    with instep.trace(model, "runs/mine") as trace:
        for x, y in trace.data(loader):
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()                        # ends the step
    print(trace)                                    # on rank 0, say; then: instep report runs/mine

What the wrapper does is recorded always; this keeps it in files, those of all ranks next to each other, and
adds what only the loop knows: where it waits for data, and what its other parts are called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from instep.events import Recorder, Timeline
from instep.net.process_group import Group
from instep.ring_buffer import read_head
from instep.timeline import trace_files
from instep.timeline.analysis import Analysis, analyse
from instep.timeline.breakdown import breakdown, parts, slowdown
from instep.timeline.run_setting import RunSetting

T = TypeVar("T")
CAPACITY = 1 << 17


class Traced(Protocol):
    """What can be traced: ``DataParallel``, ``ParameterServer``, ``Pipeline``."""

    recorder: Recorder
    group: Group

    @property
    def placement(self) -> dict[str, Any]: ...


class TraceSession:
    """What ``instep.trace`` has recorded; printed, where the time went.

    Of this rank's steps; with a ``path`` those of all ranks whose files are there, the slow one, and advice.

    Attributes:
        recorder: the events, as they were put.
        path: the directory, or None.

    Example:
        >>> model = instep.DataParallel(model)
        >>> with instep.trace(model) as trace:
        ...     for inputs, targets in trace.data(loader):
        ...         optimizer.zero_grad()
        ...         loss_function(model(inputs), targets).backward()
        ...         optimizer.step()
    """

    def __init__(self, recorder: Recorder, path: Path | None) -> None:
        self.recorder = recorder
        self.path = path
        self._first = recorder.step

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches``, with the wait for each of them recorded as waiting for data.

        Args:
            batches: a loader, or anything else to iterate over.

        Yields:
            Its items, as they are.
        """
        iterator: Iterator[T] | None = None
        while True:
            with self.recorder.span("data", lane="data"):
                try:
                    if iterator is None:
                        iterator = iter(batches)  # where a loader starts its workers
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A part of the loop that the breakdown shall have by ``name``, as host code: logging, say.

        Args:
            name: as it is to be shown.

        Returns:
            A context manager, which records from enter to exit.

        Example:
            >>> with trace.span("logging"):
            ...     line = f"step {trace.recorder.step}"
        """
        return self.recorder.span(name, lane="host")

    def analysis(self) -> Analysis:
        """The steps so far, as data: parts of each step, breakdown, buckets, the slow rank, advice.

        Without a ``path`` those of this rank alone, and no buckets, slow rank or advice.

        Example:
            >>> found = trace.analysis()
            >>> len(found.breakdowns)  # of one rank
            1
            >>> found.breakdowns[0].steps
            2
        """
        if self.path is not None:
            return analyse(trace_files.read_traces(self.path / trace_files.FOLDER))
        timeline, rank = Timeline(self.recorder.events), self.recorder.rank
        steps = [step for step in timeline.steps if step >= self._first]
        rows = [found for step in steps if (found := parts(timeline.of(rank, step))) is not None]
        if not rows:
            return Analysis({}, [], [], None, [])
        mine = breakdown(rows, slowdown(timeline.of(rank, step) for step in steps))
        return Analysis({rank: rows}, [mine], [], None, [])

    def __str__(self) -> str:
        said = [f"{label:<7}{text}" for label, text in self.analysis().lines()]
        return "\n".join(said or ["no step has ended"])


@contextmanager
def trace(
    model: Traced, path: str | Path | None = None, *, capacity: int = CAPACITY
) -> Iterator[TraceSession]:
    """Record the steps of a training loop: where does its time go, and which rank is slow?

    A context manager around the loop. Inside, each step ends with an optimizer's step, and is cut into eight
    parts: compute, exposed communication, waiting for a slower rank, a pipeline's bubble, waiting for data,
    update, host code, and what is in no event. Needs no profiler, and takes some microseconds per micro-batch
    and bucket. What the wrapper cannot see, the loop can say: ``data`` around a loader, ``span`` around a
    part of its own. Collective with a ``path``: the ranks compare their clocks.

    Args:
        model: a ``DataParallel``, ``ParameterServer``, ``Pipeline``, or module that ``fully_shard`` has
            sharded.
        path: a directory, on every rank the same: a file per rank goes into ``path/trace``, 56 bytes an
            event, and outlives a killed process; ``instep report path`` makes a page of it, and can be run
            while the loop goes on. None: memory only, and this rank's steps alone.
        capacity: events to keep in a file, the last ones; of no effect without a path.

    Yields:
        A ``TraceSession``: ``print(trace)`` says where the time went.

    Raises:
        OSError: the file cannot be made.
        TypeError: ``model`` is not wrapped.
        ValueError: ``capacity`` is not positive.
        PeerLost: a rank did not come.

    Example:
        >>> model = instep.DataParallel(model)
        >>> with instep.trace(model, "runs/mine") as trace:  # on every rank
        ...     for inputs, targets in trace.data(loader):
        ...         optimizer.zero_grad()
        ...         loss_function(model(inputs), targets).backward()
        ...         optimizer.step()  # ends the step
        >>> print(trace)  # on rank 0, say; then, in a shell: instep report runs/mine
        time   ... ms a step on average over 2 = compute ...
    """
    if not hasattr(model, "recorder"):
        raise TypeError(
            f"trace() of a {type(model).__name__}: expected the wrapper that records, an instep.DataParallel "
            "or instep.ParameterServer"
        )
    if capacity < 1:
        raise ValueError(f"capacity: expected at least 1 event, got {capacity}")
    recorder = model.recorder
    recorder.drop_step()  # what came before is no part of the first one
    if path is not None:
        head, folder = _head(model), Path(path) / trace_files.FOLDER
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make_way(trace_files.path_of(folder, recorder.rank), head)
        trace_files.record(recorder, folder, capacity, head)
    recorder.begin_step(recorder.optimizer_steps)
    try:
        yield TraceSession(recorder, None if path is None else Path(path))
    finally:
        recorder.drop_step()
        if path is not None:
            recorder.keep_in_memory()


def _head(model: Traced) -> dict[str, Any]:
    """What readers have to know of this rank. Collective."""
    group = model.group
    peers = group.peers.table
    local = sum(peer.host == group.peers.me.host for peer in peers)
    placed = {name: value for name, value in model.placement.items() if name != "cut_by"}
    setting = RunSetting(
        **{"num_leaves": 0, "bucket_mb": 0.0, **placed},
        backend=group.backend,
        world_size=group.size,
        ranks_per_host=local,
        hosts=-(-group.size // local),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
    )
    return {
        **trace_files.head_of(group),
        "process": [group.peers.me.pid, group.peers.me.start_time],
        "begun_ns": time.monotonic_ns(),
        "setting": asdict(setting),
        "script": True,  # whose calls have arguments, and no flags
    }


def _make_way(path: Path, head: dict[str, Any]) -> None:
    """Remove what an earlier process left there: the same step numbers, of another training."""
    found = read_head(path)
    if found is not None and found[0].get("process") != head["process"]:
        path.unlink()
