"""Bubbles: when one rank had nothing to do in a step because it waited for another, and why.

    compute        |backward             ...                  |     the thread that trains
    host                     |gradient sync       |                 the same thread
    communication      |wait: rank 2   |exchange  |                 the thread of exchanges
    bubbles                  | rank 2  | messages |

Where spans of the thread that trains lie in each other, the innermost says what it did: a wait inside
backward is a bubble, and work inside a wait is not. Work of a *device* is never a bubble, wherever the
thread that issued it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.events import Event
from instep.timeline.intervals import Stretch, common, minus, union
from instep.timeline.window import Window


@dataclass(frozen=True)
class Bubble:
    """One stretch of waiting; ``peer`` is the rank that was not ready, -1: messages travelled."""

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
    window = Window.of(events)
    if window is None:
        return []
    return [Bubble(window.rank, window.step, *found) for found in sorted(find(window))]


def find(window: Window) -> list[tuple[int, int, str, int]]:
    """The bubbles as (start, end, cause, peer), disjoint, in any order."""
    found: list[tuple[int, int, str, int]] = []
    taken: list[Stretch] = []
    late = _by_peer(window)
    for start, end, cause, peer in sorted(window.waits, key=_innermost_first):
        idle = minus(minus([(start, end)], _work_within(window, start, end)), taken)
        taken = union(taken + idle)
        if peer >= 0:
            found += [(low, high, cause, peer) for low, high in idle]
            continue
        for slow, stretches in late.items():
            found += [(low, high, cause, slow) for low, high in common(idle, stretches)]
            idle = minus(idle, stretches)
        found += [(low, high, cause, -1) for low, high in idle]
    return found


def _innermost_first(wait: tuple[int, int, str, int]) -> tuple[int, int, str, int]:
    return -wait[0], *wait[1:]


def _by_peer(window: Window) -> dict[int, list[Stretch]]:
    """When a bucket waited for each rank."""
    late: dict[int, list[Stretch]] = {}
    for start, end, peer in sorted(window.late):
        if peer >= 0:
            late.setdefault(peer, []).append((start, end))
    return {peer: union(stretches) for peer, stretches in late.items()}


def _work_within(window: Window, start: int, end: int) -> list[Stretch]:
    """What was done during the wait from ``start`` to ``end``: all but the spans that it lies in."""
    done = [*window.compute, *window.update]
    inside = window.data if window.on_device else done + window.data
    work = [(low, high) for low, high in inside if low < end and start < high and (low > start or high < end)]
    return union(work + done if window.on_device else work)
