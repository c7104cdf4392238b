"""A torch.profiler result as a timeline of ours, with the figures that people know from its other readers.

    profiler                                      timeline
    ProfilerStep#7                                host/"step" of step 7 (without any: one step, 0)
    kernel "nccl...Kernel..."                     communication
    other kernels, copies, memsets                compute; "update" if Optimizer.step# issued them
    copies from host to device                    data
    enumerate(DataLoader)#...                     data
    operators that lie in no other                compute, or, if there was a device, host/"issuing"
    gloo:all_reduce, c10d::..., on threads        communication, if there was no device
    Optimizer.step#...                            compute/"update", if there was no device
    other annotations of the thread that trains   host

A profile does not say for what, or for whom, a rank waited. Communication while nothing was computed and no
data was made is taken as waiting for gradients: host/"gradient sync". A collective's kernel runs until the
last rank has come, so a wait for that rank is in it. Work counts in the step in which it ran, not in which it
was issued.
"""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from instep.events import GRADIENT_SYNC, STEP, Event, Timeline
from instep.timeline.intervals import Stretch, common, length, minus, union
from instep.timeline.kineto import ANNOTATION, COPY, KERNEL, OPERATOR, STEP_NAME, Record, read_trace
from instep.timeline.window import UPDATE

COLLECTIVE_KERNEL = re.compile(r"nccl.*Kernel")  # RCCL's are called the same
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl):|c10d::|record_param_comms$")
TO_DEVICE = "Memcpy HtoD"
DATA, OPTIMIZER, ISSUING = "enumerate(DataLoader)", "Optimizer.step#", "issuing"


class Profile(Protocol):
    """``torch.profiler.profile``, after it has stopped."""

    def export_chrome_trace(self, path: str) -> Any: ...


@dataclass(frozen=True)
class Shares:
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
class Figures:
    """Shares for each step of a profile and for all of them; ``device`` is "GPU" or "CPU"."""

    device: str
    steps: tuple[Shares, ...]
    total: Shares


def read_profile(profile: Profile | Path | str, rank: int | None = None) -> tuple[Timeline, Figures]:
    """The timeline of a ``torch.profiler.profile``, or of its chrome trace (.json or .json.gz), and figures.

    ``rank``: None for what the profile says, or 0. torch lets a profile be exported only once, so export one
    that is to be kept, and pass the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, cut off, too large, or no profile.
    """
    if isinstance(profile, str):
        profile = Path(profile)
    if isinstance(profile, Path):
        records, told = read_trace(profile, profile.name)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            try:
                profile.export_chrome_trace(str(path))
            except (AssertionError, RuntimeError) as error:
                raise ValueError(
                    f"the profile cannot be exported ({error or 'it has not begun'}): torch exports one "
                    "once, after it has stopped; if it has been exported, pass the file"
                ) from error
            records, told = read_trace(path, "the profile")
    return _Bridge(records, told if rank is None else rank).cross()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class _Bridge:
    """Goes over the records of one rank: finds the steps, then the events, then the figures."""

    def __init__(self, records: Sequence[Record], rank: int) -> None:
        self.records, self.rank = records, rank
        self.on_device = any(record.kind == KERNEL for record in records)
        self.events: list[Event] = []
        self.kernels: list[Stretch] = []
        self.messages: list[Stretch] = []
        self.windows = self._find_windows()
        self._begins = [start for start, _, _ in self.windows]
        self.trains = self._thread_that_trains()

    def cross(self) -> tuple[Timeline, Figures]:
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

    def _annotations(self) -> None:
        for record in self.records:
            name = record.name
            if record.kind != ANNOTATION or STEP_NAME.match(name):
                continue
            if name.startswith(DATA):
                self._put("data", "data", record.stretch)
            elif name.startswith(OPTIMIZER) and not self.on_device:
                self._put("compute", UPDATE, record.stretch)
                self.kernels.append(record.stretch)
            elif record.thread == self.trains and not COLLECTIVE.match(name):
                self._put("host", f"{name} (annotation)" if name == STEP else name, record.stretch)

    def _device(self) -> None:
        issued = {
            record.correlation: record.start_ns
            for record in self.records
            if record.kind not in (KERNEL, COPY) and record.correlation is not None
        }
        update = self._annotated(OPTIMIZER)
        for record in self.records:
            if record.kind == KERNEL and COLLECTIVE_KERNEL.match(record.name):
                self._put("communication", record.name, record.stretch)
                self.messages.append(record.stretch)
            elif record.kind == COPY and record.name.startswith(TO_DEVICE):
                self._put("data", record.name, record.stretch)
            elif record.kind in (KERNEL, COPY):
                launched_ns = issued.get(record.correlation) if record.correlation is not None else None
                in_update = _lies_in(launched_ns, update)
                self._put("compute", UPDATE if in_update else record.name, record.stretch)
                if record.kind == KERNEL:
                    self.kernels.append(record.stretch)
        operators = union(record.stretch for record in self.records if record.kind == OPERATOR)
        for stretch in minus(operators, self._annotated(DATA)):
            self._put("host", ISSUING, stretch)

    def _threads(self) -> None:
        """Operators, but those inside other things that have a name here: data, update, collectives."""
        threads: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.kind in (OPERATOR, ANNOTATION):
                threads[record.thread].append(record)
        for records in threads.values():
            collectives = [record for record in records if COLLECTIVE.match(record.name)]
            elsewhere = union(
                record.stretch
                for record in records
                if COLLECTIVE.match(record.name) or record.name.startswith((DATA, OPTIMIZER))
            )
            for name, stretch in _outermost(record for record in records if record.kind == OPERATOR):
                for piece in minus([stretch], elsewhere):
                    self._put("compute", name, piece)
                    self.kernels.append(piece)
            for name, stretch in _outermost(collectives):
                self._put("communication", name, stretch)
                self.messages.append(stretch)

    def _exposed(self) -> None:
        at_work = union(
            (event.start_ns, event.end_ns) for event in self.events if event.lane in ("compute", "data")
        )
        for stretch in minus(union(self.messages), at_work):
            self._put("host", GRADIENT_SYNC, stretch)

    def _figures(self) -> Figures:
        kernels, messages = union(self.kernels), union(self.messages)
        both, either = common(kernels, messages), union(kernels + messages)

        def shares(step: int, windows: list[Stretch]) -> Shares:
            times = (either, kernels, messages, both)
            figures = [length(windows), *(length(common(time, windows)) for time in times)]
            return Shares(step, *(figure / 1e9 for figure in figures))

        steps = tuple(shares(step, [(start, end)]) for start, end, step in self.windows)
        total = shares(-1, [(start, end) for start, end, _ in self.windows])
        return Figures("GPU" if self.on_device else "CPU", steps, total)

    def _annotated(self, prefix: str) -> list[Stretch]:
        return union(
            record.stretch
            for record in self.records
            if record.kind == ANNOTATION and record.name.startswith(prefix)
        )

    def _put(self, lane: str, name: str, stretch: Stretch) -> None:
        """Add an event for each step into which the stretch reaches; -1: between two."""
        start, end = stretch
        at = max(bisect_right(self._begins, start) - 1, 0)
        while start < end:
            while at < len(self.windows) and self.windows[at][1] <= start:
                at += 1
            begin, stop, step = self.windows[at] if at < len(self.windows) else (end, end, -1)
            if begin > start:
                stop, step = begin, -1
            self.events.append(Event(self.rank, lane, name, start, min(stop, end), step=step))
            start = min(stop, end)


def _lies_in(at_ns: int | None, stretches: list[Stretch]) -> bool:
    if at_ns is None:
        return False
    place = bisect_right(stretches, at_ns, key=lambda stretch: stretch[0]) - 1
    return place >= 0 and at_ns < stretches[place][1]


def _outermost(records: Iterable[Record]) -> Iterator[tuple[str, Stretch]]:
    """Of the records of one thread, by their start, those that lie in no other."""
    reached = None
    for record in records:
        if reached is None or record.end_ns > reached:
            start_ns = record.start_ns if reached is None else max(record.start_ns, reached)
            yield record.name, (start_ns, record.end_ns)
            reached = record.end_ns
