"""What happened when, on which rank: the one record that tracing, planning and charts share.

Low layers emit (``recorder.span("exchange", lane="communication", ...)``), high layers read.
A span costs two clock readings and an append to a ring buffer, a few microseconds, so it may stay on for
every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that took time, on a lane: "compute", "communication", "data" or "host".

    Times are ``time.monotonic_ns()``, the same clock for all ranks of one host.
    """

    rank: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    step: int = -1
    leaf: int = -1

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Recorder:
    """A rank's last ``capacity`` events, oldest first."""

    def __init__(self, rank: int = 0, capacity: int = 65536) -> None:
        self.rank = rank
        self.events: deque[Event] = deque(maxlen=capacity)
        self.step = -1

    @contextmanager
    def span(self, name: str, *, lane: str, num_bytes: int = 0, leaf: int = -1) -> Iterator[None]:
        """Record what the block took, also when it raises."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            end_ns = time.monotonic_ns()
            self.events.append(Event(self.rank, lane, name, start_ns, end_ns, num_bytes, self.step, leaf))

    def seconds(self, name: str, step: int) -> float:
        """Sum of the durations of the events called ``name`` in ``step``, one of the last steps."""
        # A copy, because the lane may be appending.
        recent = takewhile(lambda e: e.step >= step, reversed(self.events.copy()))
        return sum(e.duration_s for e in recent if e.step == step and e.name == name)
