"""One step of one rank: its events by kind, cut to the step's window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from instep.events import PARAMETER_GATHER, STEP, WAITS, Event
from instep.timeline.intervals import Stretch, union

QUEUED, WAIT, AGREE = "queued", "wait", "agree"  # of a bucket, on lane "communication"
BACKWARD, UPDATE = "backward", "update"
ISSUED = frozenset({"forward", BACKWARD, "clip", UPDATE})  # on lane "host": what a device does later


@dataclass
class Window:
    """The stretches of one rank's step; none reaches outside of (``start_ns``, ``end_ns``)."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    compute: list[Stretch] = field(default_factory=list)  # but the update
    update: list[Stretch] = field(default_factory=list)
    data: list[Stretch] = field(default_factory=list)
    waits: list[tuple[int, int, str, int]] = field(default_factory=list)  # start, end, cause, peer
    host: list[tuple[int, int, str]] = field(default_factory=list)
    travel: list[Stretch] = field(default_factory=list)  # messages are on their way, or wait for each other
    gathers: list[Stretch] = field(default_factory=list)  # of those, weights that come
    late: list[tuple[int, int, int]] = field(default_factory=list)  # ... and peer: a bucket waits for a rank
    leaves: int = 0
    on_device: bool = False  # lane "compute" is a device's, not that of the thread that trains

    @classmethod
    def of(cls, events: Sequence[Event]) -> Window | None:
        """The window of one rank's step; None if the step has not ended.

        A step that was done again has several windows: the last counts.
        """
        span = next((event for event in reversed(events) if event.name == STEP), None)
        if span is None:
            return None
        window = cls(span.rank, span.step, span.start_ns, span.end_ns)
        window._sort_in(events)
        return window

    def at_work(self) -> list[Stretch]:
        """When the rank did anything but wait; waits in which other things lie are not cut out."""
        code = [(start, end) for start, end, _ in self.host]
        return union(self.compute + self.update + self.data + code)

    def _sort_in(self, events: Iterable[Event]) -> None:
        begin, stop = self.start_ns, self.end_ns
        for event in events:
            start, end, name, lane = event.start_ns, event.end_ns, event.name, event.lane
            if start < begin:
                start = begin
            if end > stop:
                end = stop
            if start >= end:
                continue
            if lane == "communication":
                if name == WAIT:
                    self.late.append((start, end, event.peer))
                elif name != QUEUED:
                    self.travel.append((start, end))
                    if name == PARAMETER_GATHER:
                        self.gathers.append((start, end))
            elif lane == "host":
                if name in WAITS:
                    self.waits.append((start, end, name, event.peer))
                elif name != STEP:
                    self.host.append((start, end, name))
                    self.on_device = self.on_device or name in ISSUED
            elif lane == "compute":
                (self.update if name == UPDATE else self.compute).append((start, end))
                self.leaves += name == BACKWARD
            elif lane == "data":
                self.data.append((start, end))
            else:  # a thread of its own, under an event "replicas" of the thread that trains
                self.leaves += name == BACKWARD
