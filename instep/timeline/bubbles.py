"""Bubbles: when one rank had nothing to do in a step because it waited for another, and why.

    compute        |backward             ...                  |     the thread that trains
    host                     |gradient sync       |                 the same thread
    communication      |wait: rank 2   |exchange  |                 the thread of exchanges
    bubbles                  | rank 2  | messages |

Where spans of the thread that trains lie in each other, the innermost says what it did: a wait inside
backward is a bubble, and work inside a wait is not. Work of a *device* is never a bubble, wherever the
thread that issued it waits.

``StepWindow`` sorts the events of a step by kind; ``bubbles`` finds the bubbles in it, which the breakdown,
the table of buckets, the traces and the charts all start from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from instep.events import PARAMETER_GATHER, PIPELINE, STEP, WAITS, Event
from instep.pipeline.actions import SPANS, WEIGHT_GRADIENT
from instep.timeline.intervals import Interval, difference, intersection, union

QUEUED, WAIT, AGREE = "queued", "wait", "agree"  # of a bucket, on lane "communication"
BACKWARD, UPDATE = "backward", "update"
LAST_OF_MICRO_BATCH = (BACKWARD, SPANS[WEIGHT_GRADIENT])
# Waits for other stages of a pipeline: before a rank's first computation, between, and after its last.
PHASES = FILL, STEADY, DRAIN = "pipeline fill", "pipeline steady state", "pipeline drain"
ISSUED = frozenset({"forward", BACKWARD, "clip", UPDATE})  # on lane "host": what a device does later


@dataclass
class StepWindow:
    """One rank's step: its events by kind, as intervals, cut to (``start_ns``, ``end_ns``)."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    compute: list[Interval] = field(default_factory=list)  # but the update
    update: list[Interval] = field(default_factory=list)
    data: list[Interval] = field(default_factory=list)
    waits: list[tuple[int, int, str, int]] = field(default_factory=list)  # start, end, cause, peer
    host: list[tuple[int, int, str]] = field(default_factory=list)
    travel: list[Interval] = field(default_factory=list)  # messages are on their way, or wait for each other
    gathers: list[Interval] = field(default_factory=list)  # of those, weights that come
    late: list[tuple[int, int, int]] = field(default_factory=list)  # ... and peer: a bucket waits for a rank
    micro_batches: int = 0
    stages: dict[int, list[Interval]] = field(default_factory=dict)  # of a pipeline
    on_device: bool = False  # lane "compute" is a device's, not that of the thread that trains

    @classmethod
    def of(cls, events: Sequence[Event]) -> StepWindow | None:
        """The window of one rank's step; None if the step has not ended.

        A step that was done again has several windows: the last counts.
        """
        span = next((event for event in reversed(events) if event.name == STEP), None)
        if span is None:
            return None
        window = cls(span.rank, span.step, span.start_ns, span.end_ns)
        window._sort_in(events)
        return window

    def at_work(self) -> list[Interval]:
        """When the rank did anything but wait; waits in which other things lie are not cut out."""
        code = [(start, end) for start, end, _ in self.host]
        return union(self.compute + self.update + self.data + code)

    def _sort_in(self, events: Iterable[Event]) -> None:
        begin, stop = self.start_ns, self.end_ns
        for _, lane, name, start, end, _, _, _, _, peer, stage in events:
            if start < begin:
                start = begin
            if end > stop:
                end = stop
            if start >= end:
                continue
            if lane == "communication":
                if name == WAIT:
                    self.late.append((start, end, peer))
                elif name != QUEUED:
                    self.travel.append((start, end))
                    if name == PARAMETER_GATHER:
                        self.gathers.append((start, end))
            elif lane == "host":
                if name in WAITS:
                    self.waits.append((start, end, name, peer))
                elif name != STEP:
                    self.host.append((start, end, name))
                    self.on_device = self.on_device or name in ISSUED
            elif lane == "compute":
                (self.update if name == UPDATE else self.compute).append((start, end))
                self.micro_batches += name in LAST_OF_MICRO_BATCH
                if stage >= 0:
                    self.stages.setdefault(stage, []).append((start, end))
            elif lane == "data":
                self.data.append((start, end))
            else:  # a thread of its own, under an event "replicas" of the thread that trains
                self.micro_batches += name == BACKWARD


@dataclass(frozen=True)
class Bubble:
    """One interval of waiting; ``peer`` is the rank that was not ready, -1: messages travelled.

    In a pipeline ranks wait for each other by its schedule: then ``cause`` is one of ``PHASES``, and a
    ``peer`` is no slower rank.
    """

    rank: int
    step: int
    start_ns: int
    end_ns: int
    cause: str
    peer: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def is_slowness(self) -> bool:
        """Whether it was waited for a rank that is slower."""
        return self.peer >= 0 and self.cause not in PHASES


def bubbles(events: Sequence[Event]) -> list[Bubble]:
    """The bubbles of one rank's step, by their start; none if the step has not ended."""
    window = StepWindow.of(events)
    if window is None:
        return []
    return [Bubble(window.rank, window.step, *found) for found in sorted(find_bubbles(window))]


def find_bubbles(window: StepWindow) -> list[tuple[int, int, str, int]]:
    """The bubbles as (start, end, cause, peer), disjoint, in any order."""
    found: list[tuple[int, int, str, int]] = []
    taken: list[Interval] = []
    late = _by_peer(window)
    for start, end, cause, peer in sorted(window.waits, key=_innermost_first):
        idle = difference(difference([(start, end)], _work_within(window, start, end)), taken)
        taken = union(taken + idle)
        if peer >= 0:
            found += [(low, high, cause, peer) for low, high in idle]
            continue
        for slow, intervals in late.items():
            found += [(low, high, cause, slow) for low, high in intersection(idle, intervals)]
            idle = difference(idle, intervals)
        found += [(low, high, cause, -1) for low, high in idle]
    return _in_phases(window, found) if window.stages else found


def _in_phases(
    window: StepWindow, found: Iterable[tuple[int, int, str, int]]
) -> list[tuple[int, int, str, int]]:
    """The same bubbles; what was waited for other stages is of one of ``PHASES``."""
    begins = [begin for intervals in window.stages.values() for begin, _ in intervals]
    first, last = min(begins), max(begins)

    def phase(start: int) -> str:
        return FILL if start < first else STEADY if start < last else DRAIN

    return [
        (start, end, phase(start) if cause == PIPELINE else cause, peer) for start, end, cause, peer in found
    ]


def idle_intervals(window: StepWindow) -> list[Interval]:
    """When the rank had nothing to do: its bubbles, whatever their cause."""
    return union([(start, end) for start, end, _, _ in find_bubbles(window)])


def _innermost_first(wait: tuple[int, int, str, int]) -> tuple[int, int, str, int]:
    return -wait[0], *wait[1:]


def _by_peer(window: StepWindow) -> dict[int, list[Interval]]:
    """When a bucket waited for each rank."""
    late: dict[int, list[Interval]] = {}
    for start, end, peer in sorted(window.late):
        if peer >= 0:
            late.setdefault(peer, []).append((start, end))
    return {peer: union(intervals) for peer, intervals in late.items()}


def _work_within(window: StepWindow, start: int, end: int) -> list[Interval]:
    """What was done during the wait from ``start`` to ``end``: all but the spans that it lies in."""
    done = [*window.compute, *window.update]
    inside = window.data if window.on_device else done + window.data
    work = [(low, high) for low, high in inside if low < end and start < high and (low > start or high < end)]
    return union(work + done if window.on_device else work)
