"""The rings of a run's ranks, as files in its directory: written while it runs, read at any time.

    RUN/trace/rank-00000.ring  rank-00001.ring ...       the last steps of each rank, ``instep.ring_buffer``

A reader needs no writer to have ended, or to live: it takes what is whole, and notes what is not. It believes
no figure of a file before it has looked whether it can be one.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from instep.events import STEP, Event, Recorder, Timeline
from instep.net.clocks import boot, measure
from instep.net.process_group import Group
from instep.ring_buffer import FIELDS, FIRST, RECORD, read_head

FOLDER = "trace"
PATTERN = "rank-*.ring"
KINDS = np.dtype([*[(name, "<i8") for name in FIELDS[:4]], *[(name, "<i4") for name in FIELDS[4:8]],
                  *[(name, "<u2") for name in FIELDS[8:10]], (FIELDS[10], "<i4")])  # fmt: skip
assert KINDS.itemsize == RECORD.size
MOST_RANKS = 1 << 20
MOST_NS = 1 << 61  # seventy years: of a clock, and of what two clocks are apart
NUM_NAMED = 8  # ranks, in one note


def record(recorder: Recorder, folder: Path, capacity: int, head: Mapping[str, Any]) -> None:
    """Keep what ``recorder`` records in ``folder``, the last ``capacity`` events; its parent has to be there.

    ``head`` is what ``head_of`` returns, and more: readers get all of it.

    Raises:
        OSError: there is no room, or no permission.
    """
    folder.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    recorder.keep_in(path_of(folder, recorder.rank), capacity, {**head, "versions": versions})


def head_of(group: Group) -> dict[str, Any]:
    """What ``record`` has to know of this rank of ``group``, whose clocks are compared. Collective."""
    clocks = measure(group)
    return {
        "boot": boot(),
        "host": group.peers.me.host,
        "world_size": group.size,
        "offset_ns": clocks.offsets_ns[group.rank],
        "error_ns": clocks.errors_ns[group.rank],
    }


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.ring"


@dataclass(frozen=True)
class RankTrace:
    """One rank's file, as it was when it was read. Times are moved to the clock of rank 0."""

    rank: int
    head: Mapping[str, Any]
    names: list[str]
    records: np.ndarray  # whole ones, by step, in a step by number

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """Begin and end of the steps that have ended; of one made twice, the last time.

        A run that went back to an earlier step has not made those after it, until it makes them again.
        """
        if STEP not in self.names:
            return {}
        ends = self.records[self.records["name"] == self.names.index(STEP)]
        ends = ends[(ends["step"] >= 0) & (ends["end_ns"] > ends["start_ns"])]
        found: dict[int, tuple[int, int]] = {}
        newest_first = ends[np.argsort(ends["number"])[::-1]]
        for step, *edges in newest_first[["step", "start_ns", "end_ns"]].tolist():
            if not found or step < min(found):
                found[step] = edges[0], edges[1]
        return dict(sorted(found.items()))

    def events(self, step: int) -> list[Event]:
        """The events of one step; of one made twice, those of the last time that it ended."""
        first, last = np.searchsorted(self._steps, [step, step + 1])
        rows = self.records[first:last]
        window = self.windows.get(step)
        if window is not None:
            rows = rows[(rows["end_ns"] > window[0]) & (rows["start_ns"] < window[1])]
        names, rank = self.names, self.rank
        return [
            Event(rank, names[lane], names[name], start, end, num_bytes, step, leaf, bucket, peer, stages - 1)
            for _, start, end, num_bytes, step, leaf, bucket, peer, name, lane, stages in rows.tolist()
            if names[name] != STEP or (start, end) == window
        ]

    @cached_property
    def _steps(self) -> np.ndarray:
        """Of each record, as numbers that a search need not convert each time."""
        return self.records["step"].astype(np.int64)

    @property
    def host(self) -> str:
        """Where the rank was."""
        return str(self.head.get("host") or "")

    @property
    def boot(self) -> str:
        """What it has in common with those that read the same clock."""
        return str(self.head.get("boot") or "")

    @cached_property
    def newest_ns(self) -> int:
        """When the last event ended."""
        return int(self.records["end_ns"].max()) if len(self.records) else -1

    def figure(self, key: str, most: int = MOST_RANKS) -> int:
        """A number of the head; 0 where it has none, or none that can be."""
        found = self.head.get(key)
        return found if _is_count(found, most) else 0


@dataclass(frozen=True)
class RunTraces:
    """All ranks' files; ``notes`` say what is missing or damaged."""

    traces: dict[int, RankTrace]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def steps(self) -> list[int]:
        """The steps that have ended on some rank."""
        return sorted({step for trace in self.traces.values() for step in trace.windows})

    def ranks(self, step: int) -> list[int]:
        """The ranks that made ``step`` together the last time, and have ended it.

        After a restart on fewer ranks, the files of the others still tell of the step as it was before.
        """
        windows = {rank: trace.windows[step] for rank, trace in self.traces.items() if step in trace.windows}
        if not windows:
            return []
        newest = max(begin for begin, _ in windows.values())
        return [rank for rank, (_, end) in windows.items() if end + self.error_ns > newest]

    def timeline(self, step: int) -> Timeline:
        """One step of all ranks that took part in it."""
        return Timeline(event for rank in self.ranks(step) for event in self.traces[rank].events(step))

    @cached_property
    def first(self) -> RankTrace | None:
        """The file of the lowest rank, which every world has; those of others may be of an earlier one."""
        return self.traces[min(self.traces)] if self.traces else None

    @cached_property
    def world_size(self) -> int:
        """Of the last world."""
        return self.first.figure("world_size") if self.first else 0

    @cached_property
    def begun_ns(self) -> int:
        """When the last run of ``instep.trace`` began; 0: unknown."""
        return (
            self.first.figure("begun_ns", MOST_NS) - self.first.head.get("offset_ns", 0) if self.first else 0
        )

    @cached_property
    def gone(self) -> dict[int, int]:
        """The ranks that the run has gone on without, and the last step of each."""
        begins = [begin for rank, trace in self.traces.items() if rank < self.world_size
                  for begin, _ in trace.windows.values()]  # fmt: skip
        newest = max(begins, default=0)
        return {
            rank: max(trace.windows, default=-1)
            for rank, trace in self.traces.items()
            if rank >= self.world_size > 0 and trace.newest_ns < newest
        }

    @cached_property
    def error_ns(self) -> int:
        """By how much the clock of one rank may be wrong against that of rank 0, at most."""
        return max((trace.figure("error_ns", MOST_NS) for trace in self.traces.values()), default=0)


def read_traces(folder: Path, world_size: int | None = None) -> RunTraces:
    """What is in ``folder``, of ``world_size`` ranks if that is known."""
    traces: dict[int, RankTrace] = {}
    notes: list[str] = []
    for path in sorted(folder.glob(PATTERN)):
        trace = _read(path, notes)
        if trace is None:
            continue
        if trace.rank in traces:
            notes.append(f"{_name_of(path)} is of rank {trace.rank}, as another file is: left out")
        else:
            traces[trace.rank] = trace
    size = world_size if _is_count(world_size, MOST_RANKS) else RunTraces(traces).world_size
    for rank in _of_earlier_runs(RunTraces(traces), size):
        notes.append(f"the trace of rank {rank} is of an earlier run: left out")
        del traces[rank]
    missing = [rank for rank in range(size) if rank not in traces]
    if missing and traces:
        listed = ", ".join(map(str, missing[:NUM_NAMED])) + (" and more" if len(missing) > NUM_NAMED else "")
        notes.append(f"no trace of rank {listed}: it is on another host, was lost, or was never written")
    return RunTraces(traces, notes)


def _of_earlier_runs(traces: RunTraces, world_size: int) -> list[int]:
    """Ranks that are no more, and what they did was before this run, or by a clock that has begun again."""
    clocks = {trace.host: trace.boot for rank, trace in traces.traces.items() if rank < world_size}
    found = []
    for rank, trace in traces.traces.items():
        same_clock = clocks.get(trace.host, trace.boot) == trace.boot
        if rank >= world_size and (trace.newest_ns < traces.begun_ns or not same_clock):
            found.append(rank)
    return found


def _read(path: Path, notes: list[str]) -> RankTrace | None:
    if not path.is_file():
        notes.append(f"{_name_of(path)} is not a file: left out")
        return None
    try:
        found = read_head(path)
    except RecursionError:  # of JSON in JSON in JSON
        found = None
    if found is None:
        notes.append(
            f"{_name_of(path)} is not a trace, cannot be read, or its beginning is missing: left out"
        )
        return None
    head, names = found
    capacity, rank, offset = (head.get(key, 0) for key in ("capacity", "rank", "offset_ns"))
    if not (
        _is_count(capacity, MOST_NS) and _is_count(rank, MOST_RANKS) and _is_count(offset, MOST_NS, -MOST_NS)
    ):
        notes.append(f"{_name_of(path)} has a beginning that makes no sense: left out")
        return None
    try:
        whole = max(path.stat().st_size - FIRST, 0) // RECORD.size
        records = np.fromfile(path, KINDS, count=min(capacity, whole), offset=FIRST)
    except (OSError, MemoryError):
        notes.append(f"{_name_of(path)} cannot be read: left out")
        return None
    if whole < capacity:
        notes.append(f"{_name_of(path)} is truncated: {whole} of {capacity} records are there")
    good = _good(records, capacity, len(names))
    if (torn := int(np.count_nonzero(~good & (records["number"] != 0)))) > 0:
        notes.append(f"{_name_of(path)}: {torn} record(s) are not whole: left out")
    records = records[good]
    records = records[np.lexsort((records["number"], records["step"]))]
    for edge in ("start_ns", "end_ns"):
        records[edge] -= offset
    return RankTrace(rank, head, names, records)


def _good(records: np.ndarray, capacity: int, num_names: int) -> np.ndarray:
    """Which of them are in their place, and can be."""
    good = records["number"] > 0
    good &= (records["number"] - 1) % max(capacity, 1) == np.arange(len(records))
    good &= (records["start_ns"] >= 0) & (records["end_ns"] >= records["start_ns"])
    good &= records["end_ns"] < MOST_NS
    good &= records["stages"] >= 0
    good &= (records["name"] < num_names) & (records["lane"] < num_names)
    return good


def _is_count(value: object, most: int, least: int = 0) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _name_of(path: Path) -> str:
    """Its name, as far as it is one to be read on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in path.name)
