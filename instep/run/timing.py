"""Where the time of a rank's steps goes, while it trains, and what the ranks tell each other of it.

A synchronous step takes every rank equally long, so no rank's wall time shows who is slow. Each rank's *own*
time does: compute, data and host code without the waits. It travels with the losses, one step later.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from instep.events import STEP, Event, Recorder, Timeline
from instep.timeline.breakdown import Parts, RankBreakdown, breakdown, parts, slowdown
from instep.timeline.straggler import OwnTimes, SlowRank, find_slow_rank

NUM_OWN = len(OwnTimes(0, 0, 0, 0.0, 0.0, 0.0, 0.0).to_list())
LOOKED_AT = 50  # steps, for which rank is slow now
REMEMBERED = 1000  # steps, for since when it is
SUMMED_UP = 300  # steps, for the breakdown of the run


class Timing:
    """One rank's steps: ``begin`` at the start of each, ``heard`` when the others' figures have come."""

    def __init__(self, recorder: Recorder, num_ranks: int) -> None:
        self.recorder = recorder
        self.own = [0.0] * NUM_OWN  # of the step before; zeros before there is one
        self._made: Parts | None = None  # of the open step, until what follows it
        self._bookkeeping_ns = 0  # of this step, since ``waits``
        self._num_ranks = num_ranks
        self._heard: deque[Sequence[float]] = deque(maxlen=REMEMBERED * num_ranks)
        recorder.by_optimizer = False

    def begin(self, step: int) -> None:
        """A step begins, and the one before has ended."""
        if self._made is not None:
            after_ns = time.monotonic_ns() - self._made.end_ns
            self.own = OwnTimes.of(self._made, after_ns / 1e9, self._bookkeeping_ns / 1e9).to_list()
            self._made = None
        self.recorder.begin_step(step)

    @contextmanager
    def bookkeeping(self, name: str) -> Iterator[None]:
        """A span of the run's own, one of ``BOOKKEEPING``, by which no script is slow."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            end_ns = time.monotonic_ns()
            self.recorder.put(name, start_ns, end_ns, lane="host")
            self._bookkeeping_ns += end_ns - start_ns

    def end(self) -> None:
        """The last step has ended."""
        self.recorder.end_step()

    def heard(self, told: Sequence[Sequence[float]]) -> None:
        """The ``own`` figures of every rank; those of a rank without a step yet are zeros."""
        self._heard += [figures for figures in told if any(figures)]

    def waits(self) -> tuple[float, float, float]:
        """The step is made, but for what follows it, which is host code: the seconds of it in which messages
        travelled, in which another rank was not ready, and in which a pipeline's other stages were waited
        for."""
        with self.bookkeeping("timing"):
            self._made = made = parts(self.recorder.so_far())
            self._bookkeeping_ns = 0
            return (made.exposed_s, made.waiting_s, made.bubble_s) if made else (0.0, 0.0, 0.0)

    def slow(self, steps: int = LOOKED_AT) -> SlowRank | None:
        """The rank that holds the others up, as far as the last ``steps`` tell."""
        last = [*self._heard][-steps * self._num_ranks :]
        return find_slow_rank([OwnTimes.from_list([*figures]) for figures in last])

    def breakdown(self, since: int = 0) -> RankBreakdown:
        """This rank's last steps, from ``since`` on; without any, figures of no step."""
        steps = _steps(self.recorder.last_steps(SUMMED_UP), since)
        rows = [found for events in steps if (found := parts(events)) is not None]
        if not rows:
            return RankBreakdown(self.recorder.rank, 0, 0.0, 0.0, {}, {}, {}, 0.0, 0.0)
        return breakdown(rows, slowdown(steps[-LOOKED_AT:]))


def _steps(events: Sequence[Event], since: int) -> list[list[Event]]:
    """The events of each step from ``since`` on that has ended; of one made twice, those of the last time.

    ``events`` may go back to before a restart, to steps that this part of the run has not made.
    """
    windows: dict[int, Event] = {}
    for event in reversed(events):
        if event.name == STEP and since <= event.step < min(windows, default=math.inf):
            windows[event.step] = event
    found: dict[int, list[Event]] = {step: [] for step in reversed(windows)}
    for event in Timeline(events).events:
        window = windows.get(event.step)
        if window is not None and window.start_ns < event.end_ns and event.start_ns < window.end_ns:
            found[event.step].append(event)
    return list(found.values())
