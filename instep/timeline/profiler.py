"""A torch.profiler result as a timeline of ours, with the figures that people know from its other readers.

    profiler                                      timeline
    ProfilerStep#7                                host/"step" of step 7 (without any: one step, 0)
    kernel "nccl...Kernel..."                     communication
    other kernels, copies, memsets                compute; "update" if Optimizer.step# issued them
    copies from host to device                    data
    enumerate(DataLoader)#...                     data
    operators that lie in no other                compute, or, if there was a device, host/"issuing"
    gloo:all_reduce, c10d::..., on threads        communication, if there was no device
    instep:exchange ...                           the same
    Optimizer.step#...                            compute/"update", if there was no device
    other annotations of the thread that trains   host

A profile does not say for what, or for which rank, a rank waited. Communication while nothing was computed
and no data was made is taken as waiting for gradients: host/"gradient sync". A collective's kernel runs until
the last rank has come, so a wait for that rank is in it. Work counts in the step in which it ran, not in
which it was issued.

The profile is the chrome trace that kineto writes, read as JSON and nothing else. It may come from anybody:
whatever is wrong with it is a ``ValueError`` that says so.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from instep.events import GRADIENT_SYNC, STEP, Event, Timeline
from instep.regular_files import open_regular
from instep.timeline.bubbles import UPDATE
from instep.timeline.intervals import Interval, difference, intersection, total_ns, union

MAX_BYTES = 1 << 30  # of JSON; in memory it is about eight times as much
MAX_MICROSECONDS = 1e17  # later than the year 5000
GZIP = b"\x1f\x8b"

OPERATOR, ANNOTATION, KERNEL, COPY, RUNTIME = "operator", "annotation", "kernel", "copy", "runtime"
KINDS = {
    "cpu_op": OPERATOR,
    "user_annotation": ANNOTATION,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    # in older profiles
    "Operator": OPERATOR,
    "Kernel": KERNEL,
    "Memcpy": COPY,
    "Memset": COPY,
    "Runtime": RUNTIME,
}
STEP_NAME = re.compile(r"ProfilerStep\s*#\s*(\d{1,15})$")
COLLECTIVE_KERNEL = re.compile(r"nccl.*Kernel")  # RCCL's are called the same
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl):|c10d::|record_param_comms$|instep:exchange ")
# What ``instep.net.lane`` tells of its threads: work is handed over on one thread, and executed on another.
HANDED_OVER, EXECUTED = "instep:hand over ", "instep:exchange "
# torch (2.13) writes a quotation mark in a name as it is.
NAME, QUOTE = re.compile(rb'(?m)^(\s*"name": ")(.*".*)(",)$'), re.compile(rb'(?<!\\)"')
TO_DEVICE = "Memcpy HtoD"
FIX = (
    "Profile with torch.profiler.profile(..., experimental_config="
    "torch._C._profiler._ExperimentalConfig(profile_all_threads=True))"
)
DATA, OPTIMIZER, ISSUING = "enumerate(DataLoader)", "Optimizer.step#", "issuing"


@dataclass(frozen=True)
class DeviceTimes:
    """What the device, or the processor if there was none, did in one step, or (-1) in all. In seconds.

    Kernels stand for operators where there was no device. Where a process uses several devices, it counts
    that any of them does something.
    """

    step: int
    wall: float
    busy: float  # a kernel ran, of whatever kind; copies and memsets are none
    kernels: float  # a kernel ran that is not communication
    communication: float
    overlap: float  # both ran

    @property
    def utilisation(self) -> float:
        """Busy time / wall time: "GPU Utilization" of the TensorBoard plugin of PyTorch (kineto, tb_plugin,
        ``gpu_metrics_parser.py``: kernels of any kind, merged, cut to the steps)."""
        return _share(self.busy, self.wall)

    @property
    def kernel_share(self) -> float:
        """Kernel time / wall time: "Kernel" in the "Step Time Breakdown" of the TensorBoard plugin
        (``overall_parser.py``); HTA's "compute_time_pctg" has the time from the first kernel to the last
        as its denominator (``BreakdownAnalysis.get_temporal_breakdown``)."""
        return _share(self.kernels, self.wall)

    @property
    def communication_share(self) -> float:
        """Communication time / wall time, hidden or not: "Communication" of the TensorBoard plugin's
        "Computation/Communication Overview" (``overall_parser.py``)."""
        return _share(self.communication, self.wall)

    @property
    def overlap_share(self) -> float:
        """Communication under which something was computed / communication: HTA's "comp_comm_overlap_pctg"
        (``CommunicationAnalysis.get_comm_comp_overlap``); 0 if nothing was communicated."""
        return _share(self.overlap, self.communication)


@dataclass(frozen=True)
class ProfileFigures:
    """Shares for each step of a profile and for all of them; ``device`` is "GPU" or "CPU"."""

    device: str
    steps: tuple[DeviceTimes, ...]
    total: DeviceTimes


def read_profile(path: Path | str, rank: int | None = None) -> tuple[Timeline, ProfileFigures]:
    """The timeline of a chrome trace of ``torch.profiler`` (.json or .json.gz), and its figures.

    ``rank``: None for what the profile says, or 0.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, cut off, too large, or no profile; or threads that had work are not in it.
    """
    records, found = read_records(Path(path))
    return _Converter(records, found if rank is None else rank).convert()


def read_records(path: Path) -> tuple[list[ProfileRecord], int]:
    """The records of the profile in ``path``, by their start, the longer ones first; and its rank, or 0.

    Raises:
        OSError, ValueError: as ``read_profile``.
    """
    trace = _load(path)
    records = sorted(_records(trace, path), key=lambda record: (record.start_ns, -record.end_ns))
    if not any(record.kind in (OPERATOR, KERNEL) for record in records):
        raise ValueError(
            f"{path} has neither operators nor kernels in it: it is no profile of torch.profiler"
        )
    info = trace.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return records, rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else 0


def figures_of(records: Sequence[ProfileRecord], rank: int) -> ProfileFigures:
    """The figures that ``read_profile`` has of ``records``."""
    return _Converter(records, rank).convert()[1]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class ProfileRecord(NamedTuple):
    """One complete event of a profile; ``correlation`` is the same for a kernel and for what launched it."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    thread: str
    correlation: int | None

    @property
    def interval(self) -> Interval:
        return (self.start_ns, self.end_ns)


class _Converter:
    """Goes over the records of one rank: finds the steps, then the events, then the figures."""

    def __init__(self, records: Sequence[ProfileRecord], rank: int) -> None:
        self.records, self.rank = records, rank
        self.on_device = any(record.kind == KERNEL for record in records)
        self.events: list[Event] = []
        self.kernels: list[Interval] = []
        self.messages: list[Interval] = []
        self.windows = self._find_windows()
        self._begins = [start for start, _, _ in self.windows]
        self.trains = self._thread_that_trains()
        if not self.on_device:  # where there is one, its kernels are recorded whichever thread issues them
            self._require_all_threads()

    def convert(self) -> tuple[Timeline, ProfileFigures]:
        for start_ns, end_ns, step in self.windows:
            self.events.append(Event(self.rank, "host", STEP, start_ns, end_ns, step=step))
        self._annotations()
        if self.on_device:
            self._device()
        else:
            self._threads()
        self._exposed()
        return Timeline(self.events), self._figures()

    def _find_windows(self) -> list[tuple[int, int, int]]:
        """Start, end and number of the steps, disjoint."""
        windows: list[tuple[int, int, int]] = []
        for record in self.records:
            found = STEP_NAME.match(record.name) if record.kind == ANNOTATION else None
            if found:
                start_ns = max(record.start_ns, windows[-1][1]) if windows else record.start_ns
                if start_ns < record.end_ns:
                    windows.append((start_ns, record.end_ns, int(found[1])))
        if windows:
            return windows
        return [(self.records[0].start_ns, max(record.end_ns for record in self.records), 0)]

    def _thread_that_trains(self) -> str:
        """The one with the steps; without any the one with the most operators."""
        operators: dict[str, int] = defaultdict(int)
        for record in self.records:
            if record.kind == ANNOTATION and STEP_NAME.match(record.name):
                return record.thread
            operators[record.thread] += record.kind == OPERATOR
        return max(operators, key=operators.__getitem__)

    def _require_all_threads(self) -> None:
        """Raise ``ValueError`` if a thread had work, and was not recorded."""
        names = [record.name for record in self.records if record.kind == ANNOTATION]
        handed_over = sum(name.startswith(HANDED_OVER) for name in names)
        if handed_over and not any(name.startswith(EXECUTED) for name in names):
            raise ValueError(
                f"the profile shows {handed_over} times that an exchange was handed to another thread, but "
                f"torch.profiler did not record that thread: its communication would count as none. {FIX}"
            )

    def _annotations(self) -> None:
        for record in self.records:
            name = record.name
            if record.kind != ANNOTATION or STEP_NAME.match(name) or name.startswith(HANDED_OVER):
                continue
            if name.startswith(DATA):
                self._put("data", "data", record.interval)
            elif name.startswith(OPTIMIZER) and not self.on_device:
                self._put("compute", UPDATE, record.interval)
                self.kernels.append(record.interval)
            elif record.thread == self.trains and not COLLECTIVE.match(name):
                self._put("host", f"{name} (annotation)" if name == STEP else name, record.interval)

    def _device(self) -> None:
        issued = {
            record.correlation: record.start_ns
            for record in self.records
            if record.kind not in (KERNEL, COPY) and record.correlation is not None
        }
        update = self._annotated(OPTIMIZER)
        for record in self.records:
            if record.kind == KERNEL and COLLECTIVE_KERNEL.match(record.name):
                self._put("communication", record.name, record.interval)
                self.messages.append(record.interval)
            elif record.kind == COPY and record.name.startswith(TO_DEVICE):
                self._put("data", record.name, record.interval)
            elif record.kind in (KERNEL, COPY):
                launched_ns = issued.get(record.correlation) if record.correlation is not None else None
                in_update = _lies_in(launched_ns, update)
                self._put("compute", UPDATE if in_update else record.name, record.interval)
                if record.kind == KERNEL:
                    self.kernels.append(record.interval)
        operators = union(record.interval for record in self.records if record.kind == OPERATOR)
        for interval in difference(operators, self._annotated(DATA)):
            self._put("host", ISSUING, interval)

    def _threads(self) -> None:
        """Operators, but those inside other things that have a name here: data, update, collectives."""
        threads: dict[str, list[ProfileRecord]] = defaultdict(list)
        for record in self.records:
            if record.kind in (OPERATOR, ANNOTATION):
                threads[record.thread].append(record)
        for records in threads.values():
            collectives = [record for record in records if COLLECTIVE.match(record.name)]
            elsewhere = union(
                record.interval
                for record in records
                if COLLECTIVE.match(record.name) or record.name.startswith((DATA, OPTIMIZER))
            )
            for name, interval in _outermost(record for record in records if record.kind == OPERATOR):
                for piece in difference([interval], elsewhere):
                    self._put("compute", name, piece)
                    self.kernels.append(piece)
            for name, interval in _outermost(collectives):
                self._put("communication", name, interval)
                self.messages.append(interval)

    def _exposed(self) -> None:
        at_work = union(
            (event.start_ns, event.end_ns) for event in self.events if event.lane in ("compute", "data")
        )
        for interval in difference(union(self.messages), at_work):
            self._put("host", GRADIENT_SYNC, interval)

    def _figures(self) -> ProfileFigures:
        kernels, messages = union(self.kernels), union(self.messages)
        both, either = intersection(kernels, messages), union(kernels + messages)

        def shares(step: int, windows: list[Interval]) -> DeviceTimes:
            times = (either, kernels, messages, both)
            figures = [total_ns(windows), *(total_ns(intersection(time, windows)) for time in times)]
            return DeviceTimes(step, *(figure / 1e9 for figure in figures))

        steps = tuple(shares(step, [(start, end)]) for start, end, step in self.windows)
        total = shares(-1, [(start, end) for start, end, _ in self.windows])
        return ProfileFigures("GPU" if self.on_device else "CPU", steps, total)

    def _annotated(self, prefix: str) -> list[Interval]:
        return union(
            record.interval
            for record in self.records
            if record.kind == ANNOTATION and record.name.startswith(prefix)
        )

    def _put(self, lane: str, name: str, interval: Interval) -> None:
        """Add an event for each step into which the interval reaches; -1: between two."""
        start, end = interval
        at = max(bisect_right(self._begins, start) - 1, 0)
        while start < end:
            while at < len(self.windows) and self.windows[at][1] <= start:
                at += 1
            begin, stop, step = self.windows[at] if at < len(self.windows) else (end, end, -1)
            if begin > start:
                stop, step = begin, -1
            self.events.append(Event(self.rank, lane, name, start, min(stop, end), step=step))
            start = min(stop, end)


def _lies_in(at_ns: int | None, intervals: list[Interval]) -> bool:
    if at_ns is None:
        return False
    place = bisect_right(intervals, at_ns, key=lambda interval: interval[0]) - 1
    return place >= 0 and at_ns < intervals[place][1]


def _outermost(records: Iterable[ProfileRecord]) -> Iterator[tuple[str, Interval]]:
    """Of the records of one thread, by their start, those that lie in no other."""
    reached = None
    for record in records:
        if reached is None or record.end_ns > reached:
            start_ns = record.start_ns if reached is None else max(record.start_ns, reached)
            yield record.name, (start_ns, record.end_ns)
            reached = record.end_ns


def _load(path: Path) -> dict[str, Any]:
    with open(path, "rb", opener=open_regular) as raw:  # which does not wait for a pipe
        packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(MAX_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut off: it cannot be unpacked ({error})") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} holds more than {MAX_BYTES} bytes of JSON: profile fewer steps")
    try:
        trace = _parse(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or cut off: it is not JSON ({error})") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f'{path} is no profile: expected an object with a list "traceEvents"')
    return trace


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:  # as a rule of a file that is cut off
        return json.loads(NAME.sub(_escape_quotes, data))


def _escape_quotes(name: re.Match[bytes]) -> bytes:
    return name[1] + QUOTE.sub(rb'\\"', name[2]) + name[3]


def _records(trace: Mapping[str, Any], path: Path) -> Iterator[ProfileRecord]:
    base_ns = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int) or abs(base_ns) > MAX_MICROSECONDS * 1e3:
        raise ValueError(f'{path}: expected nanoseconds as "baseTimeNanoseconds", got {_shown(base_ns)}')
    for number, event in enumerate(trace["traceEvents"]):
        where = f"{path}, event {number}"
        if not isinstance(event, dict):
            raise ValueError(f"{where}: expected an object, got {_shown(event)}")
        category = event.get("cat")
        kind = KINDS.get(category) if isinstance(category, str) else None
        if event.get("ph") == "X" and kind is not None:
            yield _record(event, kind, base_ns, where)


def _record(event: Mapping[str, Any], kind: str, base_ns: int, where: str) -> ProfileRecord:
    name, args = event.get("name"), event.get("args")
    if not isinstance(name, str):
        raise ValueError(f"{where}: expected a name, got {_shown(name)}")
    if STEP_NAME.match(name):
        kind = ANNOTATION  # in older profiles an operator
    start_ns = base_ns + _nanoseconds(event, "ts", where)
    duration_ns = _nanoseconds(event, "dur", where)
    if duration_ns < 0:
        raise ValueError(f"{where}: expected a duration of at least 0, got {duration_ns / 1e3} us")
    correlation = args.get("correlation") if isinstance(args, dict) else None
    return ProfileRecord(
        kind,
        name,
        start_ns,
        start_ns + duration_ns,
        f"{_shown(event.get('pid'))} {_shown(event.get('tid'))}",
        correlation if isinstance(correlation, int) else None,
    )


def _nanoseconds(event: Mapping[str, Any], key: str, where: str) -> int:
    value = event.get(key)
    if not isinstance(value, int | float) or not abs(value) < MAX_MICROSECONDS:  # NaN is not less either
        raise ValueError(f'{where}: expected microseconds as "{key}", got {_shown(value)}')
    return round(value * 1000)


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
