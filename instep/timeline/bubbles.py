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

from instep.events import PARAMETER_GATHER, STEP, WAITS, Event
from instep.timeline.intervals import Interval, difference, intersection, union

QUEUED, WAIT, AGREE = "queued", "wait", "agree"  # of a bucket, on lane "communication"
BACKWARD, UPDATE = "backward", "update"
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
        for _, lane, name, start, end, _, _, _, _, peer, _ in events:
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
                self.micro_batches += name == BACKWARD
            elif lane == "data":
                self.data.append((start, end))
            else:  # a thread of its own, under an event "replicas" of the thread that trains
                self.micro_batches += name == BACKWARD


@dataclass(frozen=True)
class Bubble:
    """One interval of waiting; ``peer`` is the rank that was not ready, -1: messages travelled."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    cause: str
    peer: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


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
    return found


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
