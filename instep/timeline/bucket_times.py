"""The table of buckets: when each was ready on each rank, how long it flew, what of it was exposed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, median

from instep.events import PARAMETER_GATHER, Event, Timeline
from instep.timeline.bubbles import AGREE, QUEUED, WAIT, StepWindow, idle_intervals
from instep.timeline.intervals import Interval, difference, intersection, total_ns, union


@dataclass(frozen=True)
class BucketRow:
    """One bucket, over steps; times in ms."""

    bucket: int
    bytes: int
    ready_ms: dict[int, float]  # by rank: median, after the earliest begin of the step on any rank
    skew_ms: float  # median of: latest ready - earliest ready
    slowest: int  # the rank that was most often last; -1: one rank only
    wait_ms: float  # median of the mean over ranks: began here, and a rank was not ready
    flight_ms: float  # agree + exchange
    agree_ms: float
    exchange_ms: float
    exposed_ms: float  # the flight while nothing else was done
    hidden_ms: float  # the flight under something else
    steps: int


def bucket_rows(steps: Iterable[Timeline]) -> list[BucketRow]:
    """A row per bucket in plan order, from timelines of one whole step of all ranks each.

    Where ranks have a figure each, it is their mean in the step, and of that the median over steps with
    the same buckets as the last one: earlier steps may have had buckets of other sizes.
    """
    found = [step for timeline in steps if (step := _of_step(timeline))]
    alike = [step for step in found if _sizes(step) == _sizes(found[-1])]
    return [_row(bucket, [step[bucket] for step in alike]) for bucket in sorted(alike[-1] if alike else ())]


def _sizes(step: dict[int, dict[int, _BucketFlight]]) -> dict[int, int]:
    return {bucket: max(flight.bytes for flight in flights.values()) for bucket, flights in step.items()}


@dataclass
class _BucketFlight:
    """One bucket on one rank in one step; times in ns."""

    bytes: int = 0
    ready: int | None = None  # after the earliest begin of the step
    wait: int = 0
    flight: int = 0
    agree: int = 0
    exposed: int = 0
    hidden: int = 0


def _of_step(timeline: Timeline) -> dict[int, dict[int, _BucketFlight]]:
    found: dict[int, dict[int, _BucketFlight]] = {}
    for step in timeline.steps:
        windows = {rank: StepWindow.of(timeline.of(rank, step)) for rank in timeline.ranks}
        begin = min((window.start_ns for window in windows.values() if window), default=0)
        for rank, window in windows.items():
            if window:
                for bucket, flight in _of_rank(timeline.of(rank, step), window, begin).items():
                    found.setdefault(bucket, {})[rank] = flight
    return found


def _of_rank(events: list[Event], window: StepWindow, begin_ns: int) -> dict[int, _BucketFlight]:
    idle = idle_intervals(window)
    busy = difference(window.at_work(), idle)
    flights: dict[int, _BucketFlight] = {}
    pieces: dict[int, list[Interval]] = {}
    for event in events:
        if event.bucket < 0 or event.lane != "communication" or event.name == PARAMETER_GATHER:
            continue
        if not window.start_ns <= event.start_ns < window.end_ns:
            continue  # the step was done again
        flight = flights.setdefault(event.bucket, _BucketFlight())
        flight.bytes = max(flight.bytes, event.bytes)
        length_ns = event.end_ns - event.start_ns
        if event.name == QUEUED:
            flight.ready = event.start_ns - begin_ns
        elif event.name == WAIT:
            flight.wait += length_ns
        else:
            flight.agree += length_ns if event.name == AGREE else 0
            pieces.setdefault(event.bucket, []).append((event.start_ns, event.end_ns))
    for bucket, intervals in pieces.items():
        whole, flight = union(intervals), flights[bucket]
        flight.flight = total_ns(whole)
        flight.exposed = total_ns(intersection(whole, idle))
        flight.hidden = total_ns(intersection(whole, busy))
    return flights


def _row(bucket: int, steps: list[dict[int, _BucketFlight]]) -> BucketRow:
    ready: dict[int, list[int]] = {}
    skews: list[int] = []
    last: Counter[int] = Counter()
    for flights in steps:
        at = {rank: flight.ready for rank, flight in sorted(flights.items()) if flight.ready is not None}
        for rank, ready_ns in at.items():
            ready.setdefault(rank, []).append(ready_ns)
        if len(at) > 1:
            skews.append(max(at.values()) - min(at.values()))
            last[max(at, key=at.__getitem__)] += 1

    def typical(figure: Callable[[_BucketFlight], int]) -> float:
        return median(mean(map(figure, flights.values())) for flights in steps) / 1e6

    return BucketRow(
        bucket=bucket,
        bytes=max(flight.bytes for flight in steps[-1].values()),
        ready_ms={rank: median(ready[rank]) / 1e6 for rank in sorted(ready)},
        skew_ms=median(skews) / 1e6 if skews else 0.0,
        slowest=max(sorted(last), key=last.__getitem__, default=-1),
        wait_ms=typical(lambda flight: flight.wait),
        flight_ms=typical(lambda flight: flight.flight),
        agree_ms=typical(lambda flight: flight.agree),
        exchange_ms=typical(lambda flight: flight.flight - flight.agree),
        exposed_ms=typical(lambda flight: flight.exposed),
        hidden_ms=typical(lambda flight: flight.hidden),
        steps=len(steps),
    )
